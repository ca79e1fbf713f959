import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import * as calls from "./calls";
import { at, install } from "./fixtures";
import { OperationPage } from "./operation-page";
import { merged } from "./operation-query";

vi.mock("./calls", { spy: true });

afterEach(() => {
  cleanup();
  vi.resetAllMocks();
  vi.unstubAllGlobals();
});

const NODES = [
  { node_id: "n1", node_name: "gpu-1", status: "downloading", percentage: 40 },
  { node_id: "n2", node_name: "gpu-2", status: "queued", percentage: 0, reason: "queued" },
] as const;

/** What the server answers: the record of one operation (404 without it), and the changes of people. */
function serve(record: Operation | null, entries: readonly object[] = []): (request: Request) => Promise<Response> {
  const answer = (body: unknown, status: number) => Promise.resolve(new Response(JSON.stringify(body), { status, headers: { "Content-Type": "application/json" } }));
  const answers = (request: Request) => {
    if (new URL(request.url).pathname === "/api/audit") return answer({ entries }, 200);
    return record === null ? answer({ error: "no operation has this id" }, 404) : answer(record, 200);
  };
  vi.stubGlobal("fetch", answers);
  return answers;
}

function open(id: string, ...live: Operation[]): LiveStore {
  const store = new LiveStore();
  store.push({ type: "operations.snapshot", seq: 1, operations: live });
  stage(store, createMemoryRouter([{ path: "/app/operations/:id", element: <OperationPage /> }], { initialEntries: [`/app/operations/${id}`] }));
  return store;
}

it("says that an id is unknown", async () => {
  serve(null);
  open("nothing");
  expect(await screen.findByRole("heading", { name: "Operation not found" })).toBeTruthy();
});

it("shows one that has long ended from the record, with who asked and from where", async () => {
  const ended = install("x", { jobID: "long-ago", status: "completed", finishedAt: at(60), clientAddress: "10.0.0.9", actor: "ann" }, { status: "success", startedAt: at(10), finishedAt: at(60), attempts: 2 });
  serve(ended, [{ id: 1, at: at(0), kind: "operation.asked", actor_kind: "user", actor: "ann", address: "10.0.0.9", request_id: "", subject: "", subject_id: "", detail: "" }]);
  open("long-ago");
  expect(await screen.findByRole("heading", { level: 1, name: "Installed backend echo on x" })).toBeTruthy();
  expect(screen.getByRole("region", { name: "Request" }).textContent).toContain("ann from 10.0.0.9");
  expect(screen.getByRole("region", { name: "Timeline" }).textContent).toContain("waited 10s, ran 50s · 2 failed attempts");
  expect((await screen.findByRole("region", { name: "Changes by people" })).textContent).toContain("asked");
});

it("is live, and says what a queued node waits for", async () => {
  const job = install("x", { jobID: "j", nodes: [...NODES] });
  const waiting = { ...NODES[1], waitsFor: "3rd in the queue of node gpu-2 (4 of 4 running)", queuePlace: 3 };
  serve({ ...job, nodes: [NODES[0], waiting] });
  const store = open("j", job);
  expect((await screen.findAllByRole("list", { name: "Nodes of echo" })).length).toBeGreaterThan(0);
  await vi.waitFor(() => expect(screen.getAllByText(waiting.waitsFor).length).toBeGreaterThan(0));
  store.push({ type: "operations.delta", seq: 999, operations: [{ ...job, status: "cancelled", seq: 999, finishedAt: at(9), nodes: NODES.map((target) => ({ ...target, status: "cancelled" as const })) }] });
  expect(await screen.findByRole("heading", { level: 1, name: "Cancelled: install backend echo on 2 nodes" })).toBeTruthy();
});

it("asks for the changes of people again when one was made, and not with each step of the work", async () => {
  const job = install("x", { jobID: "j", nodes: [...NODES] });
  let requestCount = 0;
  const answers = serve(job);
  vi.stubGlobal("fetch", (request: Request) => {
    if (new URL(request.url).pathname === "/api/audit") requestCount += 1;
    return answers(request);
  });
  const store = open("j", job);
  await vi.waitFor(() => expect(requestCount).toBe(1));
  const step = (percentage: number) => [{ ...NODES[0], percentage }, NODES[1]];
  for (const percentage of [50, 60, 70]) store.push({ type: "operations.delta", seq: 900 + percentage, operations: [{ ...job, seq: 900 + percentage, nodes: step(percentage) }] });
  await vi.waitFor(() => expect(screen.getAllByText(/70/).length).toBeGreaterThan(0));
  expect(requestCount).toBe(1);
  store.push({ type: "operations.delta", seq: 999, operations: [{ ...job, seq: 999, nodes: [NODES[0], { ...NODES[1], status: "cancelled" }] }] });
  await vi.waitFor(() => expect(requestCount).toBe(2));
});

it("cancels one node only, after a question", async () => {
  const job = install("x", { jobID: "j", cancellable: true, nodes: [...NODES] });
  serve(job);
  const cancelOn = vi.mocked(calls.cancelOn).mockResolvedValue({});
  open("j", job);
  fireEvent.click(await screen.findByRole("button", { name: "Cancel echo on gpu-2" }));
  fireEvent.click(within(await screen.findByRole("alertdialog")).getByRole("button", { name: "Cancel on this node" }));
  await vi.waitFor(() => expect(cancelOn.mock.calls.map(([operation, node]) => [operation.jobID, node])).toEqual([["j", "n2"]]));
});

it("the newer of record and feed counts, and an older record still says what is waited for", () => {
  const job = install("x", { status: "pending", isQueued: true, seq: 5 }, { status: "queued" });
  const record = { ...job, seq: 4, waitsFor: "waits for node x, which is offline", nodes: (job.nodes ?? []).map((target) => ({ ...target, waitsFor: "waits for node x, which is offline" })) };
  expect(merged(record, job)?.message).toBe("waits for node x, which is offline");
  expect(merged(record, { ...job, status: "completed" })?.message).toBe("queued");
  expect(merged({ ...record, seq: 6, status: "failed" }, job)?.status).toBe("failed");
});
