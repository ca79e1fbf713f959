import { act, cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { GIB, model, node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { memoryWords, needWords, signed, versionOf, type Decision, type Explained } from "./explanation-query";
import { ModelPage } from "./model-page";

vi.mock("../overview/charts", () => ({ Charts: () => null }));

type Answer = { data: Explained; response: Response } | { error: unknown; response: Response };

const MOMENT = "2026-08-22T10:00:00Z";
let reads: ((answer: Answer) => void)[];
let store: LiveStore;

function decision(overrides: Partial<Decision> = {}): Decision {
  const terms = { failures: 0, shared: false, has_memory: true, busy: false, in_flight: 0, memory: 20 * GIB };
  return {
    outcome: "placed", reason: "most VRAM free: 20.0 GiB against 12.0 GiB on n2", node_id: "n1", node: "n1", replica_index: 0, selector: "",
    need: { vram: 8 * GIB, vram_required: false, disk: 0, disk_required: true }, nodes: { considered: 3, feasible: 2 },
    refused: [{ code: "full", reason: "no free slot for this model", count: 1 }],
    best: [
      { node_id: "n1", node: "n1", replica_index: 0, terms },
      { node_id: "n2", node: "n2", replica_index: 1, terms: { ...terms, memory: 12 * GIB }, against: "20.0 GiB free against 12.0 GiB" },
    ],
    misses: [
      { node_id: "gone", node: "n3", code: "full", reason: "no free slot for this model", free_vram: -GIB, available_disk: 0, total_disk: 0, replicas: 1, slots: 1, in_flight: 2 },
    ],
    evicts: [],
    ...overrides,
  };
}

const WAITING: Partial<Decision> = { outcome: "waiting", reason: "no node has 8 GiB", node_id: null, node: null, replica_index: null, best: [] };

function recordedDecision(id: number, overrides: Partial<Decision> = {}): Explained["records"][number] {
  return { id, kind: "placement", operation_id: `o${id}`, at: MOMENT, last_at: MOMENT, ...decision(overrides) };
}

function explained(reason: string, records: Explained["records"], placement: Decision | null = decision()): Explained {
  return { model: "tiny", defined: true, replicas: [], records, next: { action: "route", says: reason, replica_id: null, operation_id: null, placement, memory: null } };
}

beforeEach(() => {
  reads = [];
  vi.spyOn(client, "GET").mockImplementation(((path: string, sent: { params?: { path: unknown } }) => {
    if (path === "/api/models/{model}/explain") {
      expect(sent.params?.path).toEqual({ model: "tiny" });
      return new Promise<Answer>((answer) => reads.push(answer));
    }
    return Promise.resolve({ data: path === "/api/definitions" ? { definitions: [], total: 0, unusable: [] } : path === "/api/figures/models" ? { models: [] } : [], response: new Response() });
  }) as never);
  store = show(new LiveStore(), node("n1", { models: [model("tiny", 0)] }), node("n2"));
  store.push({ type: "operations.snapshot", seq: 1, operations: [] });
  stage(store, createMemoryRouter([{ path: "/app/models/:name", element: <ModelPage /> }], { initialEntries: ["/app/models/tiny"] }));
});

afterEach(cleanup);

async function read(number: number): Promise<(answer: Answer) => void> {
  return vi.waitFor(() => {
    const answer = reads[number];
    if (answer === undefined || reads.length !== number + 1) throw new Error(`${reads.length} reads`);
    return answer;
  });
}

async function respond(number: number, data: Explained): Promise<void> {
  const answer = await read(number);
  await act(async () => {
    answer({ data, response: new Response() });
    await Promise.resolve();
  });
}

async function open() {
  const panel = within(await screen.findByRole("region", { name: "Replicas" }));
  fireEvent.click(panel.getByRole("button", { name: "Why here: tiny" }));
  return panel;
}

function lines(table: HTMLElement): string[][] {
  return within(table).getAllByRole("row").slice(1).map((row) => [...row.children].map((cell) => cell.textContent));
}

it("shows what the next request finds, the latest decision with its nodes, and why not the others (UI-8.7)", async () => {
  const panel = await open();
  expect(panel.getByText("Loading reasons…")).toBeTruthy();
  await respond(0, explained("the request is sent to replica 0 on n1 (in flight: 2)", [recordedDecision(8), recordedDecision(7, { reason: "the only node" })]));
  expect(await panel.findByText("the request is sent to replica 0 on n1 (in flight: 2)")).toBeTruthy();
  const decisions = within(panel.getByRole("list", { name: "Decisions for tiny" })).getAllByRole("button").filter((element) => element.hasAttribute("aria-expanded"));
  expect(decisions.map((element) => element.getAttribute("aria-expanded"))).toEqual(["false", "true", "false"]);
  expect(decisions.map((element) => element.textContent)).toEqual(["One more replica would now go to n1#0", expect.stringMatching(/^placed n1#0/), expect.stringMatching(/^placed/)]);
  expect(panel.getByText(/2 of 3 nodes could take the replica\. Needs: 8 GiB of VRAM if possible\./)).toBeTruthy();
  expect(lines(panel.getByRole("table", { name: "Best nodes for tiny" }))).toEqual([
    ["n1#0", "0", "no", "yes", "none", "0", "20 GiB free", ""],
    ["n2#1", "0", "no", "yes", "none", "0", "12 GiB free", "20.0 GiB free against 12.0 GiB"],
  ]);
  const misses = panel.getByRole("table", { name: "Nearest misses for tiny" });
  expect(lines(misses)).toEqual([["n3", "no free slot for this model", "−1 GiB", "not reported", "1 of 1", "2"]]);
  expect(within(misses).queryByRole("link")).toBeNull();
  const best = panel.getByRole("table", { name: "Best nodes for tiny" });
  fireEvent.click(within(best).getByRole("button", { name: "VRAM" }));
  fireEvent.click(within(best).getByRole("button", { name: /^VRAM/ }));
  expect(lines(best).map(([node]) => node)).toEqual(["n2#1", "n1#0"]);
  expect(within(misses).getAllByRole("button").map((heading) => heading.textContent)).toEqual(["Node", "Reason", "VRAM free", "Disk available", "Replicas", "In flight"]);
});

it("shows how much of the quota for models is used where a node has one", async () => {
  const panel = await open();
  const [plain] = decision().misses;
  const limited = { node_id: "n2", node: "n2", code: "quota", reason: "190.0 GiB of 200.0 GiB of the quota for models are used, 12 GiB more are needed", free_vram: 8 * GIB, available_disk: 900 * GIB, total_disk: 1024 * GIB, disk_quota: 200 * GIB, quota_used: 190 * GIB, replicas: 0, slots: 1, in_flight: 0 };
  await respond(0, explained("a load starts and waits", [], decision({ ...WAITING, misses: [limited, ...(plain === undefined ? [] : [plain])] })));
  await panel.findByRole("button", { name: /^One more replica would now/ });
  const misses = panel.getByRole("table", { name: "Nearest misses for tiny" });
  expect(within(misses).getAllByRole("columnheader").map((heading) => heading.textContent)).toContain("Quota used");
  expect(lines(misses).map((row) => row.slice(3, 5))).toEqual([["900 GiB of 1 TiB", "190 GiB of 200 GiB"], ["not reported", "no quota"]]);
});

it("shows how much of a disk other loads will take", async () => {
  const panel = await open();
  const promised = { node_id: "n2", node: "n2", code: "disk", reason: "without the disk space it needs", free_vram: 8 * GIB, available_disk: 200 * GIB, promised_bytes: 150 * GIB, total_disk: 1024 * GIB, replicas: 0, slots: 1, in_flight: 0 };
  await respond(0, explained("a load starts and waits", [], decision({ ...WAITING, misses: [promised] })));
  await panel.findByRole("button", { name: /^One more replica would now/ });
  expect(lines(panel.getByRole("table", { name: "Nearest misses for tiny" })).map((row) => row[3])).toEqual(["200 GiB of 1 TiB, 150 GiB for other loads"]);
});

it("shows a wait with its reason, and another decision when it is chosen (UI-8.7)", async () => {
  const panel = await open();
  await respond(0, explained("a load starts and waits: no node has 8 GiB", [recordedDecision(8, WAITING), recordedDecision(7)], decision(WAITING)));
  const list = within(await panel.findByRole("list", { name: "Decisions for tiny" }));
  expect(list.getByText("One more replica would now wait")).toBeTruthy();
  expect(list.getByText("waiting")).toBeTruthy();
  expect(panel.queryByRole("table", { name: /Best/ })).toBeNull();
  expect(panel.getByRole("table", { name: "Nearest misses for tiny" })).toBeTruthy();
  fireEvent.click(list.getByRole("button", { name: /^placed/ }));
  expect(panel.getByRole("table", { name: "Best nodes for tiny" })).toBeTruthy();
  fireEvent.click(list.getByRole("button", { name: /^placed/ }));
  expect(panel.queryByRole("table", { name: "Nearest misses for tiny" })).toBeNull();
});

it("says why it could not be read, and reads again on demand (UI-8.7)", async () => {
  const panel = await open();
  const answer = await read(0);
  answer({ error: { error: { code: 404, message: "this model is not defined", type: "x" } }, response: new Response(null, { status: 404 }) });
  expect((await panel.findByRole("alert")).textContent).toContain("this model is not defined");
  expect(reads).toHaveLength(1);
  fireEvent.click(panel.getByRole("button", { name: "Try again" }));
  await respond(1, explained("model tiny is not defined", [], null));
  expect(await panel.findByText("No placement decisions yet.")).toBeTruthy();
  expect(panel.queryByRole("alert")).toBeNull();
});

it("reads again when its replicas change, also during a read (UI-8.7)", async () => {
  const panel = await open();
  await read(0);
  show(store, node("n1", { models: [model("tiny", 0)] }), node("n2", { models: [model("tiny", 0, { id: "new" })] }));
  expect(await screen.findByText("Replicas 2")).toBeTruthy();
  expect(reads).toHaveLength(1);
  await respond(0, explained("from before", []));
  await respond(1, explained("with two", [recordedDecision(9)]));
  expect(await panel.findByText("with two")).toBeTruthy();
  show(store, node("n1", { models: [model("tiny", 0)] }));
  await respond(2, explained("with one", [recordedDecision(9)]));
  expect(await panel.findByText("with one")).toBeTruthy();
});

it("counts states and work as a change, but no requests and no progress (UI-8.7)", () => {
  const at = node("n1");
  const load = { jobID: "j", status: "processing", phase: "staging", attempts: 1, message: "40%", progress: 40 } as Operation;
  const version = (change: Partial<Operation>, replica = model("tiny", 0)) => versionOf({ places: [{ node: at, model: replica }], active: [{ ...load, ...change }], failed: [] });
  const previous = version({});
  expect(version({ progress: 50, message: "50%" }, model("tiny", 0, { in_flight: 9 }))).toBe(previous);
  expect(version({ phase: "loading" })).not.toBe(previous);
  expect(version({}, model("tiny", 0, { state: "unloading" }))).not.toBe(previous);
  expect(version({ status: "waiting_for_nodes", message: "a" })).not.toBe(version({ status: "waiting_for_nodes", message: "b" }));
});

it("has words for needs and figures, also for what is not known (UI-8.7)", () => {
  expect(needWords({ vram: 0, vram_required: true, disk: 0, disk_required: true })).toBe("not known");
  expect(needWords({ vram: GIB, vram_required: true, disk: GIB, disk_required: true })).toBe("1 GiB of VRAM, 1 GiB of disk");
  expect(memoryWords({ failures: 0, shared: false, has_memory: false, busy: true, in_flight: 0, memory: GIB })).toBe("1 GiB available");
  expect(signed(0)).toBe("0 B");
});
