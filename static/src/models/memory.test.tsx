import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { GIB, node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { contextWords, helpWords, termsWords, verdictWords, type MemoryExplained } from "./memory";
import { definition } from "./model-fixtures";
import { ModelPage } from "./model-page";

vi.mock("../overview/charts", () => ({ Charts: () => null }));

type Entry = MemoryExplained["nodes"][number];

const ENTRY: Entry = { node_id: "n1", node: "n1", verdict: "fits", needed: 9.8 * GIB, usable: 22 * GIB, missing: 0, context: 0, unload: [], reason: "", says: "fits on n1" };

let requests: string[];
let need: { source?: string; readings?: number };

beforeEach(() => {
  requests = [];
  need = { source: "estimated", readings: 0 };
  vi.spyOn(client, "GET").mockImplementation(((path: string) => {
    if (path === "/api/definitions") return Promise.resolve({ data: { definitions: [definition("tiny")], total: 1, unusable: [] }, response: new Response() });
    if (path === "/api/figures/models") return Promise.resolve({ data: { models: [] }, response: new Response() });
    if (path !== "/api/placement/fit/{model}") return Promise.resolve({ data: [], response: new Response() });
    requests.push(path);
    const memory = { says: "", terms: { weights: 7.2 * GIB }, context: 8192, considered: 2, nodes: [ENTRY, { ...ENTRY, node_id: "n2", node: "n2", verdict: "unknown", usable: 0 }, { ...ENTRY, node_id: "n3", node: "n3", verdict: "refused", reason: "offline", usable: 0 }] };
    return Promise.resolve({ data: { model: "tiny", nodes: [], memory, placement: { need } }, response: new Response() });
  }) as never);
  const store = show(new LiveStore(), node("n1"), node("n2"));
  store.push({ type: "operations.snapshot", seq: 1, operations: [] });
  stage(store, createMemoryRouter([{ path: "/app/models/:name", element: <ModelPage /> }], { initialEntries: ["/app/models/tiny"] }));
});

afterEach(cleanup);

it("shows where a model fits before any load, and reads it only when the panel is opened (UW9)", async () => {
  const panel = within(await screen.findByRole("region", { name: "Replicas" }));
  expect(requests).toEqual([]);
  fireEvent.click(panel.getByRole("button", { name: "Where it fits: tiny" }));
  const table = within(await panel.findByRole("table", { name: "Memory for tiny" }));
  expect(table.getAllByRole("row").slice(1).map((row) => row.textContent)).toEqual(["n1fits9.8 GiB22 GiB", "n2not known9.8 GiBnot reported", "n3not possible9.8 GiB–offline"]);
  expect(panel.getByText("Needs: weights 7.2 GiB, with 8k of context.")).toBeTruthy();
  expect(requests).toHaveLength(1);
  expect(panel.queryByText(/^(Measured|Stated)/)).toBeNull();
});

it("sorts the nodes, each named by its row header", async () => {
  const panel = within(await screen.findByRole("region", { name: "Replicas" }));
  fireEvent.click(panel.getByRole("button", { name: "Where it fits: tiny" }));
  const table = within(await panel.findByRole("table", { name: "Memory for tiny" }));
  const names = () => table.getAllByRole("rowheader").map((cell) => cell.textContent);
  expect(names()).toEqual(["n1", "n2", "n3"]);
  expect(table.getByRole("link", { name: "n1" }).getAttribute("href")).toBe("/app/nodes/n1");
  fireEvent.click(table.getByRole("button", { name: "Node" }));
  fireEvent.click(table.getByRole("button", { name: /^Node/ }));
  expect(names()).toEqual(["n3", "n2", "n1"]);
  fireEvent.click(table.getByRole("button", { name: "Free" }));
  expect(names()).toEqual(["n1", "n2", "n3"]);
});

it.each([
  [{ source: "learned", readings: 3 }, "Measured in the last 3 loads."],
  [{ source: "learned", readings: 1 }, "Measured in the last load."],
  [{ source: "stated", readings: 0 }, "Stated in the definition."],
])("says where the need comes from: %j", async (source, sentence) => {
  need = source;
  const panel = within(await screen.findByRole("region", { name: "Replicas" }));
  fireEvent.click(panel.getByRole("button", { name: "Where it fits: tiny" }));
  expect(await panel.findByText(sentence)).toBeTruthy();
});

it("says what is missing and what would help (UW9)", () => {
  const lacking: Entry = { ...ENTRY, verdict: "smaller_context", missing: 1.4 * GIB, context: 16384 };
  expect([verdictWords(lacking), helpWords(lacking)]).toEqual(["with 16k of context", "1.4 GiB missing: lower the context to 16k"]);
  expect(helpWords({ ...lacking, verdict: "lacks_memory", context: 0 })).toBe("1.4 GiB missing");
  expect(helpWords({ ...ENTRY, verdict: "refused", reason: "offline" })).toBe("offline");
  expect([contextWords(1000), contextWords(4096)]).toEqual(["1000", "4k"]);
  expect(termsWords({ terms: {}, context: 8192 })).toBe("");
  expect(termsWords({ terms: { weights: GIB, measured: 2 * GIB }, context: 0 })).toBe("weights 1 GiB, other 2 GiB");
  expect(termsWords({ terms: { measured: 2 * GIB }, context: 0 })).toBe("measured 2 GiB");
  expect(termsWords({ terms: { stated: 9 * GIB }, context: 0 })).toBe("9 GiB");
});
