import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { model, node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { SchedulingPage } from "./page";
import type { Rule } from "./rules";

const AT = "2026-08-22T10:00:00Z";
const OLD: Rule = {
  id: "1", model_name: "org/m", node_selector: '{"tier":"fast"}', min_replicas: 2, max_replicas: 0, unsatisfiable_ticks: 3,
  unsatisfiable_until: new Date(Date.now() + 600_000).toISOString(), created_at: AT, updated_at: AT,
  state: { wanted: 2, current: 1, loading: 0, reason: "no node with room", at: AT },
};

let rules: Rule[];
let requests: [string, unknown][];
let refusal: { error: string; field: string } | null;

function answer(data: unknown, status = 200): Promise<unknown> {
  return Promise.resolve({ data, response: new Response(null, { status: status }) });
}

beforeEach(() => {
  rules = [OLD];
  requests = [];
  refusal = null;
  vi.spyOn(client, "GET").mockImplementation(((path: string) => answer(path === "/api/models/capabilities" ? { data: [{ id: "org/m", backend: "echo", capabilities: [], disabled: false, pinned: false }] } : rules)) as never);
  vi.spyOn(client, "POST").mockImplementation(((path: string, sent: { body: unknown }) => {
    if (path === "/api/placement/plan") return answer({ replicas_now: 0, wanted: 1, loads: [], retires: [], unsatisfiable: null, misses: [] });
    requests.push([path, sent.body]);
    return refusal === null ? answer({ model_name: "m" }) : Promise.resolve({ error: refusal, response: new Response(null, { status: 400 }) });
  }) as never);
  vi.spyOn(client, "DELETE").mockImplementation(((path: string, sent: { params: unknown }) => {
    requests.push([path, sent.params]);
    rules = [];
    return answer(undefined, 204);
  }) as never);
});

afterEach(cleanup);

async function open(): Promise<LiveStore> {
  const store = show(new LiveStore(), node("n1", { labels: { tier: "fast" }, models: [model("org/m", 0)] }), node("n2", { status: "offline", labels: { tier: "slow" } }));
  stage(store, createMemoryRouter([{ path: "*", element: <SchedulingPage /> }]));
  await waitFor(() => expect(screen.queryByText(/Loading/)).toBeNull());
  return store;
}

async function dialog(button: string) {
  fireEvent.click(await screen.findByRole("button", { name: button }));
  return within(await screen.findByRole("dialog"));
}

it("shows each rule with its figures, its reason, its cooldown and its nodes (UW10, UI-6.1, UI-6.3)", async () => {
  await open();
  const row = within(screen.getByRole("table", { name: "Scheduling rules" })).getAllByRole("row")[1];
  for (const part of ["org/m", "tier=fast", "at least 2", "wanted2", "running1", "loading0", "cooling down", "next attempt in", "3 passes in a row", "no node with room"]) {
    expect(row?.textContent).toContain(part);
  }
  expect(await within(screen.getByRole("table", { name: "Scheduling rules" })).findByRole("link", { name: "n1" })).toBeTruthy();
});

it("says what a rule is where there is none (UI-6.6)", async () => {
  rules = [];
  await open();
  expect((await screen.findByText("No scheduling rules")).parentElement?.textContent).toContain("how many replicas");
});

it("reads the rules again when the feed says so (UI-6.2)", async () => {
  const store = await open();
  rules = [{ ...OLD, state: { wanted: 2, current: 2, loading: 0, reason: "all there", at: AT } }];
  store.push({ type: "rules", revision: "2" });
  await screen.findByText(/all there/);
});

it("counts matching nodes as labels are typed, and warns of none or of none that works (UW11, UI-6.5)", async () => {
  await open();
  const form = await dialog("Add rule…");
  await form.findByText(/Matches 2 of 2 nodes: n1, n2/);
  const type = (label: string, text: string) => fireEvent.change(form.getByLabelText(label), { target: { value: text } });
  type("Label", "tier");
  type("Value", "fast");
  expect(form.getByText(/Matches 1 of 2 nodes: n1/)).toBeTruthy();
  type("Value", "slow");
  expect(form.getByText(/No matching node is healthy/)).toBeTruthy();
  type("Value", "odd");
  fireEvent.keyDown(form.getByLabelText("Value"), { key: "Enter" });
  expect(form.getByText(/No node matches/)).toBeTruthy();
  fireEvent.click(form.getByRole("button", { name: "Remove label tier=odd" }));
  expect(form.getByText(/Matches 2 of 2 nodes/)).toBeTruthy();
});

it("saves a new rule, and shows the server's refusal at its field with everything still there (E41, UI-6.4)", async () => {
  refusal = { error: "min_replicas must be <= max_replicas", field: "min_replicas" };
  await open();
  const form = await dialog("Add rule…");
  fireEvent.click(form.getByRole("button", { name: "Save rule" }));
  expect((await form.findByText("Enter a model.")).getAttribute("role")).toBe("alert");
  expect(requests).toEqual([]);
  fireEvent.change(form.getByLabelText("Model"), { target: { value: "org/m" } });
  expect(form.getByText("This model has a rule. Saving replaces it.")).toBeTruthy();
  fireEvent.change(form.getByLabelText("Model"), { target: { value: "new" } });
  fireEvent.change(form.getByLabelText("Minimum replicas"), { target: { value: "3" } });
  fireEvent.change(form.getByLabelText("Maximum replicas"), { target: { value: "4" } });
  fireEvent.click(form.getByRole("button", { name: "Save rule" }));
  await form.findByText("min_replicas must be <= max_replicas");
  const field = form.getByLabelText<HTMLInputElement>("Minimum replicas");
  expect([field.getAttribute("aria-invalid"), field.value]).toEqual(["true", "3"]);
  refusal = null;
  fireEvent.change(form.getByLabelText("Maximum replicas"), { target: { value: "3" } });
  fireEvent.click(form.getByRole("button", { name: "Save rule" }));
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(requests.at(-1)).toEqual(["/api/nodes/scheduling", expect.objectContaining({ model_name: "new", min_replicas: 3, max_replicas: 3, node_selector: {} })]);
});

it("editing fills every field and keeps the model (E41, UI-6.4)", async () => {
  await open();
  const form = await dialog("Edit rule of org/m");
  expect(form.queryByLabelText("Model")).toBeNull();
  expect(form.getByLabelText<HTMLInputElement>("Minimum replicas").value).toBe("2");
  expect(form.getByText("tier=fast")).toBeTruthy();
  fireEvent.click(form.getByLabelText("One replica on every matching node"));
  expect(form.queryByLabelText("Minimum replicas")).toBeNull();
  fireEvent.click(form.getByRole("button", { name: "Save rule" }));
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(requests.at(-1)).toEqual(["/api/nodes/scheduling", expect.objectContaining({ model_name: "org/m", spread_all: true, min_replicas: 0, node_selector: { tier: "fast" } })]);
});

it("says while a rule is edited that it has changed, or is gone, and not that a pass has looked at it (UI-6.4)", async () => {
  const store = await open();
  const form = await dialog("Edit rule of org/m");
  const reread = (revision: string, ...next: Rule[]) => {
    rules = next;
    store.push({ type: "rules", revision });
  };
  reread("2", { ...OLD, min_replicas: 5 });
  expect(await form.findByText(/has changed in the meantime/)).toBeTruthy();
  expect(form.getByLabelText<HTMLInputElement>("Minimum replicas").value).toBe("2");
  reread("3", { ...OLD, updated_at: "2026-08-22T11:00:00Z", unsatisfiable_ticks: 0 });
  await waitFor(() => expect(form.queryByText(/has changed in the meantime/)).toBeNull());
  reread("4");
  expect(await form.findByText(/was deleted in the meantime/)).toBeTruthy();
});

it("deletes after a question that starts on Cancel (UI-6.6)", async () => {
  await open();
  fireEvent.click(screen.getByRole("button", { name: "Delete rule of org/m" }));
  const question = within(screen.getByRole("alertdialog"));
  expect(document.activeElement).toBe(question.getByRole("button", { name: "Cancel" }));
  fireEvent.click(question.getByRole("button", { name: "Delete" }));
  await screen.findByText("No scheduling rules");
  expect(requests).toEqual([["/api/nodes/scheduling/{model}", { path: { model: "org/m" } }]]);
});

it("a list that cannot be read is not taken for an empty one (UI-6.6, E43)", async () => {
  vi.spyOn(client, "GET").mockImplementation((() => Promise.resolve({ error: { error: "down" }, response: new Response(null, { status: 503 }) })) as never);
  await open();
  expect((await screen.findByRole("alert")).textContent).toContain("down");
  expect(screen.queryByText("No scheduling rules")).toBeNull();
});

it("what only routes says so, in the dialog's More as well (UI-6.7)", async () => {
  rules = [{ ...OLD, min_replicas: 0, route_policy: "prefix_cache" }];
  await open();
  expect(screen.getByText("restricts nodes only")).toBeTruthy();
  const form = await dialog("Edit rule of org/m");
  expect(form.getByLabelText("Routing policy").textContent).toContain("Prefix cache");
  expect(form.getByText("Request routing").closest("details")?.open).toBe(true);
});
