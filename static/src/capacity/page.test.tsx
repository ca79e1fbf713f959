import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { GIB, node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { CapacityPage } from "./page";
import { WhatIfPage } from "./what-if";

const DECISION = {
  outcome: "waiting", reason: "no node can take the replica: 1 offline", node_id: null, node: null, replica_index: null, need: { vram: GIB, vram_required: false, disk: 0, disk_required: false },
  selector: "", nodes: { considered: 2, feasible: 0 }, refused: [], best: [],
  misses: [{ node_id: "b", node: "b", code: "full", reason: "no free slot for this model", free_vram: GIB, available_disk: 0, total_disk: 0, replicas: 1, slots: 1, in_flight: 0 }],
};

const MEMORY = {
  says: "fits on (new 1) (needs 9.8 of 24.0 GiB: weights 7.2, context 2.6)", terms: { weights: 7.2 * GIB, context: 2.6 * GIB }, context: 8192, considered: 22,
  nodes: [
    { node_id: "0", node: "(new 1)", verdict: "fits", needed: 9.8 * GIB, usable: 24 * GIB, missing: 0, context: 0, unload: [], reason: "", says: "" },
    { node_id: "b", node: "b", verdict: "lacks_memory", needed: 9.8 * GIB, usable: 8.4 * GIB, missing: 1.4 * GIB, context: 4096, unload: ["x#0"], reason: "", says: "" },
  ],
};

let requests: [string, unknown][];

beforeEach(() => {
  requests = [];
  vi.spyOn(client, "GET").mockImplementation(((path: string, sent: { params: unknown }) => {
    if (path === "/api/models/capabilities") return Promise.resolve({ data: { data: [] }, response: new Response() });
    requests.push([path, sent.params]);
    const nodes = [{ node_id: "a", reason: "offline", enough_vram: true }, { node_id: "b", reason: "no free slot for this model", enough_vram: true }];
    return Promise.resolve({ data: { model: "org/m", nodes, placement: DECISION }, response: new Response() });
  }) as never);
  vi.spyOn(client, "POST").mockImplementation(((path: string, sent: { body: unknown }) => {
    requests.push([path, sent.body]);
    const placed = { ...DECISION, replica: 1, hypothetical: true, outcome: "placed", node: "(new 1)", node_id: "0", replica_index: 0, reason: "the only node", misses: [], need: { ...DECISION.need, source: "learned", readings: 2 } };
    return Promise.resolve({ data: { model: "org/m", wanted: 2, placed: 1, decisions: [placed, { ...DECISION, replica: 2, hypothetical: false }], memory: MEMORY }, response: new Response() });
  }) as never);
});

afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
});

function open(path: string): void {
  const store = show(new LiveStore(), node("a", { status: "offline", total_vram: 8 * GIB }), node("b", { total_vram: 24 * GIB, available_vram: 20 * GIB, reserved_vram: 4 * GIB }), node("c"));
  stage(store, createMemoryRouter([{ path: "/app/capacity", element: <CapacityPage /> }, { path: "/app/capacity/what-if", element: <WhatIfPage /> }], { initialEntries: [path] }));
}

it("shows each node's memory and the sums of what is in service (UI-7.1)", async () => {
  open("/app/capacity");
  const b = await screen.findByRole("link", { name: "b 16 GiB free: 4 GiB used, 4 GiB reserved, 16 GiB free of 24 GiB" });
  expect(b.getAttribute("href")).toBe("/app/nodes/b");
  expect(screen.getByRole("link", { name: /^a .*; offline$/ })).toBeTruthy();
  expect(screen.getByText("16 GiB on b")).toBeTruthy();
  expect(screen.getByText(/1 node in service; 1 not in service, not counted; 1 without GPU/)).toBeTruthy();
});

it("one cell takes Tab, and the arrows go on from there (UI-7.2)", async () => {
  open("/app/capacity");
  const a = await screen.findByRole("link", { name: /^a / });
  const b = screen.getByRole("link", { name: /^b / });
  expect([a.tabIndex, b.tabIndex]).toEqual([0, -1]);
  a.focus();
  fireEvent.keyDown(a, { key: "ArrowRight" });
  expect(document.activeElement).toBe(b);
  await waitFor(() => expect([a.tabIndex, b.tabIndex]).toEqual([-1, 0]));
  fireEvent.keyDown(b, { key: "Home" });
  expect(document.activeElement).toBe(a);
});

it("says of each node whether a model fits, and the nearest miss where none does (UI-7.3, UW9)", async () => {
  open("/app/capacity?model=org%2Fm");
  const panel = within(await screen.findByRole("region", { name: "Where org/m fits" }));
  expect(panel.getByRole("status").textContent).toContain("Nearest miss: b, no free slot for this model.");
  expect(screen.getByRole("link", { name: /^b .*no free slot for this model$/ }).textContent).toContain("no");
  expect(requests).toEqual([["/api/placement/fit/{model}", { path: { model: "org/m" } }]]);
});

it("plans with nodes that do not exist, and says why there and why not there (UI-7.4, UW12)", async () => {
  open("/app/capacity/what-if");
  fireEvent.click(screen.getByRole("button", { name: "Plan" }));
  expect((await screen.findByText("Enter a model, choose a file, or enter how much memory it needs.")).getAttribute("role")).toBe("alert");
  const type = (label: string, text: string) => fireEvent.change(screen.getByLabelText(label), { target: { value: text } });
  type("Model", "org/m");
  type("Replicas", "2");
  type("New nodes", "3");
  type("VRAM of each, GiB", "24");
  type("Labels of each", "tier=fast, zone=west 1");
  fireEvent.click(screen.getByRole("button", { name: "Plan" }));
  const plan = within(await screen.findByRole("region", { name: "The plan" }));
  expect(plan.getByRole("status").textContent).toBe("1 of 2 replicas can be placed");
  expect(plan.getAllByRole("listitem").map((item) => item.textContent)).toEqual([expect.stringContaining("Replica 1: (new 1)#0 new node the only node"), expect.stringContaining("Replica 2: no node")]);
  expect(plan.getByRole("table", { name: "Nearest misses for org/m, replica 2" })).toBeTruthy();
  const nodes = [{ count: 3, vram_gib: 24, disk_gib: 0, labels: { tier: "fast", zone: "west 1" } }];
  expect(requests).toEqual([["/api/placement/plan", { model: "org/m", replicas: 2, nodes }]]);
  const memory = within(plan.getByRole("table", { name: "Memory for org/m" }));
  expect(memory.getAllByRole("row").map((row) => row.textContent)).toEqual([
    "NodeFitsNeedsFreeDetails",
    "(new 1)fits9.8 GiB24 GiB",
    "bdoes not fit9.8 GiB8.4 GiB1.4 GiB missing: unload x#0 or lower the context to 4k",
  ]);
  expect(plan.getByText("Needs: weights 7.2 GiB, context 2.6 GiB, with 8k of context.")).toBeTruthy();
  expect(plan.getByText("Measured in the last 2 loads.")).toBeTruthy();
  expect(plan.getByText("20 more nodes are not shown.")).toBeTruthy();
});

it("plans for a file of this computer, of which only the beginning is sent, and says so (UW12)", async () => {
  open("/app/capacity/what-if");
  expect(screen.getByText("Only its first 16 MiB are sent.")).toBeTruthy();
  const file = new File(["GGUF"], "m.gguf");
  fireEvent.change(screen.getByLabelText("Or a GGUF file on this computer"), { target: { files: [file] } });
  fireEvent.change(screen.getByLabelText("Context, tokens"), { target: { value: "16384" } });
  fireEvent.click(screen.getByRole("button", { name: "Plan" }));
  await screen.findByRole("region", { name: "The plan" });
  expect(requests).toEqual([["/api/placement/plan", { file: { size: 4, header: btoa("GGUF"), definition: { context_size: 16384 } } }]]);
});
