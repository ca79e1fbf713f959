import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { labelled } from "./labels";
import { LabelsCard } from "./labels-card";
import { countsIn, Preview, type RulePlan } from "./preview";
import { BLANK, type Draft } from "./rules";

let requests: unknown[];
let answer: () => Promise<unknown>;

const PLAN: RulePlan = {
  replicas_now: 1, wanted: 3, loads: [{ node: "a", why: "most VRAM free" }], retires: [],
  unsatisfiable: { reason: "no node with room for one more", counts: { offline: 2, "no free slot for this model": 1 } }, misses: [],
  loading: 0, left_out: 0, says: "", waits_until: null,
  rule: { model_name: "m", min_replicas: 3, max_replicas: 0, node_selector: {}, spread_all: false },
};

beforeEach(() => {
  requests = [];
  answer = () => Promise.resolve({ data: PLAN, response: new Response() });
  vi.spyOn(client, "POST").mockImplementation(((_: string, sent: { body: unknown }) => {
    requests.push(sent.body);
    return answer();
  }) as never);
});

afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
});

function open(draft: Partial<Draft>): void {
  stage(new LiveStore(), createMemoryRouter([{ path: "*", element: <Preview draft={{ ...BLANK, ...draft }} /> }]));
}

it("says what a rule would do now: loads where and why, and why it cannot be met (UI-6.9, UW12)", async () => {
  open({ model: "m", min: "3", selector: { tier: "fast" } });
  const preview = within(await screen.findByRole("region", { name: "Preview of the rule" }));
  expect((await preview.findByRole("status")).textContent).toBe("1 replica now, 3 wanted.");
  expect(preview.getByRole("list", { name: "Loads" }).textContent).toBe("a: most VRAM free");
  expect(preview.getByText(/The rule cannot be met now/).textContent).toContain("no node with room for one more");
  expect(preview.getByText("2 nodes: offline; 1 node: no free slot for this model")).toBeTruthy();
  expect(requests).toEqual([{ rule: expect.objectContaining({ model_name: "m", min_replicas: 3, node_selector: { tier: "fast" } }) as unknown }]);
});

it("asks nothing of a rule that cannot be sent, and shows a refusal in place (UI-6.9)", async () => {
  open({});
  expect(screen.queryByRole("region")).toBeNull();
  cleanup();
  answer = () => Promise.resolve({ error: { error: "min_replicas must be <= max_replicas" }, response: new Response(null, { status: 400 }) });
  open({ model: "m", min: "3", max: "4" });
  expect((await screen.findByRole("alert")).textContent).toContain("min_replicas must be <= max_replicas");
  expect(requests).toHaveLength(1);
});

it("says the codes of reasons in the words of a miss", () => {
  expect(countsIn({ full: 2, offline: 1 }, [{ code: "full", reason: "no free slot for this model" }])).toBe("2 nodes: no free slot for this model; 1 node: offline");
});

const FLEET = Array.from({ length: 30 }, (_, at) => node(`gpu-${at}`, { labels: at === 7 ? { zone: "west 1" } : at === 8 ? {} : { tier: "fast" } }));

it("labels of nodes: five first, twenty more, a forgiving search with a live count, collapsible (E40, E43, UI-6.8)", async () => {
  stage(show(new LiveStore(), ...FLEET), createMemoryRouter([{ path: "*", element: <LabelsCard /> }]));
  const items = () => screen.getAllByRole("listitem");
  await vi.waitFor(() => expect(items()).toHaveLength(5));
  expect(screen.getByText("30 of 30 nodes")).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Show 20 more" }));
  expect(items()).toHaveLength(25);
  fireEvent.change(screen.getByRole("searchbox", { name: "Search node labels" }), { target: { value: "zn=wst" } });
  await vi.waitFor(() => expect(items().map((item) => item.textContent)).toEqual([expect.stringContaining("zone=west 1")]));
  expect(screen.getByText("1 of 30 nodes")).toBeTruthy();
  fireEvent.change(screen.getByRole("searchbox", { name: "Search node labels" }), { target: { value: "nowhere" } });
  expect(await screen.findByText("No node matches.")).toBeTruthy();
  const toggle = screen.getByRole("button", { name: "Hide node labels" });
  fireEvent.click(toggle);
  expect([toggle.getAttribute("aria-expanded"), screen.queryByRole("searchbox")]).toEqual(["false", null]);
});

it("a label search needs every word, over name, keys, values and both together (E40)", () => {
  const names = (term: string) => labelled(FLEET, term).map((node) => node.name);
  expect(names("gpu-7 west")).toEqual(["gpu-7"]);
  expect(names("tier=fast gpu-29")).toEqual(["gpu-29"]);
  expect(names("")).toHaveLength(30);
});
