import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, describe, expect, it, vi } from "vitest";
import { ApiError } from "../../api/client";
import { LiveContext } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { LiveStore } from "../../live/store";
import { ApproveDialog, DrainDialog } from "./dialogs";
import { install } from "../../operations/fixtures";
import * as verbs from "./verbs";

vi.mock("./verbs", { spy: true });

afterEach(cleanup);

function node(id: string, overrides: Partial<LiveNode> = {}): LiveNode {
  const empty = { labels: {}, models: [], model_count: 0, in_flight_count: 0, drain: null, rejected: null, revoked: null, joined: null, worker_version: "", version_skew: "" };
  const facts = { node_type: "backend", weak_identity: false, fingerprint: "aaaa", source_address: "", address: "", gpu_vendor: "" };
  return { id, name: id, status: "healthy", gpu_compute_capability: "", created_at: "", ...empty, ...facts, ...overrides } as LiveNode;
}

const target = (id: string, status: "success" | "error", overrides = {}) => ({ node_id: id, node_name: id, status, percentage: 0, ...overrides });

const refused = (status: number) => Promise.reject(new ApiError(`no ${status}`, status));

function show(dialog: React.ReactNode, store = new LiveStore()): void {
  render(
    <LiveContext.Provider value={store}>
      <Tooltip.Provider>{dialog}</Tooltip.Provider>
    </LiveContext.Provider>,
  );
}

function press(name: string): void {
  fireEvent.click(screen.getByRole("button", { name }));
}

describe("a verb's dialog (UW4, UW16, UW18)", () => {
  it("approves by the fingerprint that is shown, after a refusal by the one that is shown then", async () => {
    const approve = vi.mocked(verbs.approve).mockImplementation(() => refused(409));
    const store = new LiveStore();
    const close = vi.fn();
    show(<ApproveDialog nodes={[node("n1", { status: "pending" })]} onClose={close} />, store);
    press("Approve");
    await screen.findByText("no 409");
    await screen.findByText("Review again");
    approve.mockResolvedValue({ id: "n1", name: "n1", node_type: "backend", status: "healthy", message: "" });
    store.push({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1", { status: "pending", fingerprint: "bbbbcccc" })] });
    await vi.waitFor(() => expect(store.read().nodes.size).toBe(1));
    press("Review again");
    expect(screen.getByText("bbbb cccc")).toBeTruthy();
    press("Approve");
    await vi.waitFor(() => expect(close).toHaveBeenCalledOnce());
    expect(approve.mock.calls).toEqual([
      ["n1", "aaaa"],
      ["n1", "bbbbcccc"],
    ]);
  });

  it("names who is left out and why, starts on Cancel, asks once for all, and retries only what failed", async () => {
    const drain = vi.mocked(verbs.drain).mockResolvedValue({ message: "" });
    const onAll = vi.mocked(verbs.onAll).mockResolvedValue({ jobID: "job", statusUrl: "", message: "" });
    const store = new LiveStore();
    const nodes = [node("n1"), node("n2"), node("n3", { status: "pending" })];
    show(<DrainDialog nodes={nodes} onClose={vi.fn()} />, store);
    expect(screen.getByText("pending: receives no work")).toBeTruthy();
    expect(document.activeElement?.textContent).toBe("Cancel");
    fireEvent.change(screen.getByLabelText(/Deadline/), { target: { value: "2" } });
    press("Drain 2 nodes");
    await screen.findByRole("button", { name: "Continue in background" });
    const targets = [target("n1", "success"), target("n2", "error", { error: "busy" })];
    store.push({ type: "operations.snapshot", seq: 1, operations: [install("x", { jobID: "job", kind: "node_drain", status: "failed", nodes: targets })] });
    await screen.findByText("1 node set to draining, 1 failed");
    press("Retry failed (1)");
    await screen.findByText("2 nodes set to draining");
    expect(onAll.mock.calls.map(([verb, targets, options]) => [verb, targets.map(({ id }) => id), options])).toEqual([["drain", ["n1", "n2"], { reason: "", deadline_seconds: 120 }]]);
    expect(drain.mock.calls).toEqual([["n2", "", 2]]);
  });

  it("names the nodes that the server refuses, starts nothing, and goes on with the others", async () => {
    const refusals = [{ id: "n2", name: "n2", reason: "the node is pending" }];
    const onAll = vi.mocked(verbs.onAll).mockReset().mockRejectedValueOnce(new ApiError("n2: the node is pending", 409, "ids", "", 0, "", {}, [], refusals));
    onAll.mockResolvedValue({ jobID: "job", statusUrl: "", message: "" });
    show(<DrainDialog nodes={[node("n1"), node("n2"), node("n3")]} onClose={vi.fn()} />);
    press("Drain 3 nodes");
    expect((await screen.findByRole("alert")).textContent).toContain("Nothing has started: the action is not possible for 1 node.");
    expect(screen.getByRole("region", { name: "Skipped" }).textContent).toContain("n2the node is pending");
    press("Drain 2 nodes");
    await screen.findByRole("button", { name: "Continue in background" });
    expect(onAll.mock.calls.map(([, targets]) => targets.map(({ id }) => id))).toEqual([["n1", "n2", "n3"], ["n1", "n3"]]);
  });

  it("asks after a refused retry about the nodes of that retry only, not about those that are done", async () => {
    const refusals = [{ id: "n2", name: "n2", reason: "the node is pending" }];
    const onAll = vi.mocked(verbs.onAll).mockReset().mockResolvedValueOnce({ jobID: "job", statusUrl: "", message: "" });
    onAll.mockRejectedValueOnce(new ApiError("n2: the node is pending", 409, "ids", "", 0, "", {}, [], refusals));
    const store = new LiveStore();
    show(<DrainDialog nodes={[node("n1"), node("n2"), node("n3")]} onClose={vi.fn()} />, store);
    press("Drain 3 nodes");
    await screen.findByRole("button", { name: "Continue in background" });
    const targets = [target("n1", "success"), target("n2", "error", { error: "busy" }), target("n3", "error", { error: "busy" })];
    store.push({ type: "operations.snapshot", seq: 1, operations: [install("x", { jobID: "job", kind: "node_drain", status: "failed", nodes: targets })] });
    fireEvent.click(await screen.findByRole("button", { name: "Retry failed (2)" }));
    await screen.findByRole("alert");
    expect(screen.getByRole("button", { name: "Drain 1 node" })).toBeTruthy();
    expect(screen.queryByText("n1")).toBeNull();
  });
});
