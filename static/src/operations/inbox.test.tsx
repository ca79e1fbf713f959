import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import * as calls from "./calls";
import { at, install } from "./fixtures";
import { InboxPage } from "./inbox";

vi.mock("./calls", { spy: true });

afterEach(() => {
  cleanup();
  vi.resetAllMocks();
});

function failure(node: string, second: number, overrides: Partial<Operation> = {}): Operation {
  return install(node, { name: `on-${node}`, status: "failed", error: `no room on ${node}`, finishedAt: at(second), ...overrides });
}

async function open(...operations: Operation[]): Promise<LiveStore> {
  const store = new LiveStore();
  store.push({ type: "operations.snapshot", seq: 1, operations });
  stage(store, createMemoryRouter([{ path: "*", element: <InboxPage /> }]));
  await screen.findByRole("list", { name: "Failures" });
  return store;
}

function lines(): string[] {
  return within(screen.getByRole("list", { name: "Failures" })).getAllByRole("heading").map((line) => line.textContent);
}

it("lists failures that are not dismissed, the newest first, with their number in the tab", async () => {
  await open(failure("a", 1), failure("b", 5), failure("c", 3, { dismissedAt: at(4) }), install("d"));
  expect(lines()).toEqual(["Could not install backend on-b on b", "Could not install backend on-a on a"]);
  expect(screen.getByRole("link", { name: /^Inbox\s*, 2 failures$/ })).toBeTruthy();
});

it("is live: what is dismissed elsewhere goes, what fails comes", async () => {
  const store = await open(failure("a", 1));
  store.push({ type: "operations.delta", seq: 999, operations: [failure("a", 1, { dismissedAt: at(2), seq: 998 }), failure("b", 3, { seq: 999 })] });
  await vi.waitFor(() => expect(lines()).toEqual(["Could not install backend on-b on b"]));
});

it("dismisses the selected ones with one comment, and no other", async () => {
  const act = vi.mocked(calls.act).mockResolvedValue();
  await open(failure("a", 1), failure("b", 2), failure("c", 3));
  for (const node of ["a", "c"]) fireEvent.click(screen.getByRole("checkbox", { name: `Select: Could not install backend on-${node} on ${node}` }));
  fireEvent.click(screen.getByRole("button", { name: "Dismiss selected (2)…" }));
  fireEvent.change(screen.getByLabelText("Comment (optional)"), { target: { value: "  disks replaced " } });
  fireEvent.click(within(screen.getByRole("dialog")).getByRole("button", { name: "Dismiss" }));
  await vi.waitFor(() => expect(act.mock.calls.map(([verb, items, comment]) => [verb, items.map((operation) => operation.jobID), comment])).toEqual([["dismiss", ["job-c", "job-a"], "disks replaced"]]));
});

it("retries all that can be retried: a load comes again with its request", async () => {
  const act = vi.mocked(calls.act).mockResolvedValue();
  vi.mocked(calls.canRetry).mockImplementation((operation) => operation.kind.startsWith("backend_"));
  await open(failure("a", 1), failure("b", 2, { kind: "model_load", isBackend: false, taskType: "staging" }));
  fireEvent.click(screen.getByRole("button", { name: "Retry all (2)…" }));
  expect(act).not.toHaveBeenCalled();
  fireEvent.click(within(screen.getByRole("alertdialog")).getByRole("button", { name: "Retry 1 operation" }));
  await vi.waitFor(() => expect(act.mock.calls.map(([verb, items]) => [verb, items.map((operation) => operation.jobID)])).toEqual([["retry", ["job-a"]]]));
});

it("keeps the buttons of the selection when all that was selected is gone", async () => {
  const act = vi.mocked(calls.act).mockResolvedValue();
  vi.mocked(calls.canRetry).mockReturnValue(true);
  const store = await open(failure("a", 1), failure("b", 2));
  fireEvent.click(screen.getByRole("checkbox", { name: "Select: Could not install backend on-a on a" }));
  store.push({ type: "operations.delta", seq: 999, operations: [failure("a", 1, { dismissedAt: at(2), seq: 999 })] });
  const button = await screen.findByRole("button", { name: /^Retry selected \(0\)/ });
  fireEvent.click(button);
  expect(act).not.toHaveBeenCalled();
  fireEvent.click(screen.getByRole("checkbox", { name: "Select: Could not install backend on-b on b" }));
  fireEvent.click(screen.getByRole("button", { name: "Retry selected (1)" }));
  await vi.waitFor(() => expect(act.mock.calls.map(([verb, items]) => [verb, items.map((operation) => operation.jobID)])).toEqual([["retry", ["job-b"]]]));
});

it("of several operations counts both, and dismisses a failure on its node only", async () => {
  const dismiss = vi.mocked(calls.dismiss).mockResolvedValue({});
  const nodes = (job: string) => [0, 1].map((n) => ({ node_id: `${job}${n}`, node_name: `${job}-${n}`, status: "error" as const, percentage: 0, error: "full", cause: "full" }));
  await open(failure("x", 1, { nodes: nodes("x") }), failure("y", 2, { nodes: nodes("y") }));
  expect(screen.getByRole("button", { name: "4 failures in 2 operations: full", expanded: true })).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Dismiss on-x on x-1" }));
  await vi.waitFor(() => expect(dismiss.mock.calls.map(([job, , ids]) => [job.jobID, ids])).toEqual([["job-x", ["x1"]]]));
});

it("of several nodes offers all that failed, and each of them", async () => {
  const retry = vi.mocked(calls.retry).mockResolvedValue({} as Awaited<ReturnType<typeof calls.retry>>);
  vi.mocked(calls.canRetry).mockReturnValue(true);
  const nodes = (["success", "error", "error"] as const).map((status, n) => ({ node_id: `n${n}`, node_name: `gpu-${n}`, status, percentage: 0, ...(status === "error" ? { error: `full: ${n}` } : {}) }));
  await open(failure("x", 1, { nodes }));
  expect(screen.getByRole("button", { name: "Retry all failed (2): on-x on 2 nodes" }).textContent).toBe("Retry all failed (2)");
  fireEvent.click(screen.getByRole("button", { name: "Retry on-x on gpu-2" }));
  await vi.waitFor(() => expect(retry.mock.calls.map(([operation, items]) => [operation.jobID, items])).toEqual([["job-x", ["n2"]]]));
});

it("300 equal failures are one card, whatever the numbers and nodes in their errors (P10)", async () => {
  const act = vi.mocked(calls.act).mockResolvedValue();
  vi.mocked(calls.canRetry).mockReturnValue(true);
  await open(...Array.from({ length: 300 }, (_, n) => failure(`n${n}`, n, { error: `${n} MiB free on n${n}`, cause: "… free on …" })), failure("other", 500, { cause: "no image" }));
  expect(lines()).toEqual(["Could not install backend on-other on other", "Could not install backend in 300 operations"]);
  expect(screen.getByRole("button", { name: /300 operations: … free on …$/ }).getAttribute("aria-expanded")).toBe("false");
  fireEvent.click(screen.getByRole("button", { name: /^Retry all: .* in 300 operations$/ }));
  await vi.waitFor(() => expect(act.mock.calls.map(([verb, items]) => [verb, items.length])).toEqual([["retry", 300]]));
});

it("the nodes of one operation are grouped by cause, each with its own actions; what was dismissed is gone", async () => {
  const retry = vi.mocked(calls.retry).mockResolvedValue({} as Awaited<ReturnType<typeof calls.retry>>);
  const dismiss = vi.mocked(calls.dismiss).mockResolvedValue({});
  vi.mocked(calls.canRetry).mockReturnValue(true);
  const target = (n: number, cause: string, overrides = {}) => ({ node_id: `n${n}`, node_name: `gpu-${n}`, status: "error" as const, percentage: 0, error: `${cause} ${n}`, cause, ...overrides });
  const nodes = [...Array.from({ length: 18 }, (_, n) => target(n, "registry answered 403")), target(18, "no space"), target(19, "no space"), target(20, "known", { dismissedAt: at(2) })];
  await open(failure("x", 1, { nodes }));
  expect(lines()).toEqual(["Could not install backend on-x on 20 nodes"]);
  const causes = within(screen.getByRole("list", { name: "Causes of the failure of on-x" }));
  expect(causes.getAllByRole("button", { expanded: false }).map((line) => line.textContent)).toEqual(["▸ 18 nodes: registry answered 403", "▸ 2 nodes: no space"]);
  fireEvent.click(causes.getByRole("button", { name: "Retry (18): registry answered 403" }));
  fireEvent.click(causes.getByRole("button", { name: "Dismiss (2): no space" }));
  await vi.waitFor(() => expect(dismiss.mock.calls.map(([, , ids]) => ids)).toEqual([["n18", "n19"]]));
  expect(retry.mock.calls.map(([, ids]) => ids?.length)).toEqual([18]);
  fireEvent.click(causes.getByRole("button", { name: /2 nodes: no space/ }));
  expect(causes.getByRole("link", { name: "gpu-19" })).toBeTruthy();
});
