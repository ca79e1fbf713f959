import { describe, expect, it } from "vitest";
import type { FeedMessage, LiveNode, Operation, OperationTarget } from "./messages";
import { apply, EMPTY, isActive } from "./store";

function operation(jobID: string, seq: number, status: Operation["status"], overrides: Partial<Operation> = {}): Operation {
  return { jobID, seq, status, progress: 0, ...overrides } as Operation;
}

function node(id: string, overrides: Partial<LiveNode> = {}): LiveNode {
  return { id, name: id, status: "healthy", ...overrides } as LiveNode;
}

const NOW = Date.parse("2026-08-22T10:00:00Z");

function after(...messages: FeedMessage[]): typeof EMPTY {
  return apply(EMPTY, messages, NOW);
}

describe("the live state", () => {
  it("is a snapshot and then changes; an older change of an operation does not undo a newer one (O85)", () => {
    const state = after(
      { type: "operations.snapshot", seq: 5, operations: [operation("a", 5, "processing")] },
      { type: "operations.delta", seq: 9, operations: [operation("a", 9, "completed")] },
      { type: "operations.delta", seq: 7, operations: [operation("a", 7, "processing")] },
    );
    expect(state.operations.get("a")?.status).toBe("completed");
    expect(state.operationsSeq).toBe(9);
  });

  it("takes over the parts that moved and keeps the others; an operation it does not know has ended", () => {
    const targets = (...values: number[]) =>
      values.map((percentage, index) => ({ node_id: `n${String(index)}`, percentage })) as OperationTarget[];
    const fullOperation = operation("a", 5, "processing", { error: "gone by then", nodes: targets(1, 1, 1) });
    const moved = operation("a", 6, "processing", { nodes: targets(0, 9).slice(1) });
    const state = after(
      { type: "operations.snapshot", seq: 5, operations: [fullOperation] },
      { type: "operations.delta", seq: 7, operations: [moved, operation("b", 7, "cancelled", { nodes: [] })], partial: ["a", "b"] },
      { type: "operations.delta", seq: 7, operations: [operation("a", 4, "pending", { nodes: targets(0) })], partial: ["a"] },
    );
    expect(state.operations.get("a")?.nodes?.map((target) => target.percentage)).toEqual([1, 9, 1]);
    expect(state.operations.get("a")).toMatchObject({ seq: 6, status: "processing" });
    expect(state.operations.get("a")).not.toHaveProperty("error");
    expect(state.operations.has("b")).toBe(false);
    expect(fullOperation.nodes?.[1]?.percentage).toBe(1);
  });

  it("patches nodes by key and drops those that went", () => {
    const state = after(
      { type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1", { available_ram: 5 }), node("n2")] },
      { type: "nodes.delta", cursor: "e:2", changed: [{ id: "n1", status: "draining" }, node("n3")], removed: ["n2"] },
    );
    expect([...state.nodes.keys()]).toEqual(["n1", "n3"]);
    expect(state.nodes.get("n1")).toMatchObject({ status: "draining", available_ram: 5 });
    expect(state.nodesCursor).toBe("e:2");
  });

  it("leaves the maps of what did not change alone, so that no one is drawn again for it (E66)", () => {
    const first = after({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1")] });
    const second = apply(first, [{ type: "alive", at: "2026-08-22T10:00:05Z" }], NOW);
    expect(second.nodes).toBe(first.nodes);
    expect(second.operations).toBe(first.operations);
  });

  it("does not write into a state that somebody still shows", () => {
    const first = after({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1")] });
    apply(first, [{ type: "nodes.delta", cursor: "e:2", changed: [{ id: "n1", status: "offline" }], removed: [] }], NOW);
    expect(first.nodes.get("n1")?.status).toBe("healthy");
  });

  it("forgets what ended long ago, never what runs or failed (O29)", () => {
    const ended = Array.from({ length: 1000 }, (_, n) => operation(`done-${n}`, n + 10, "completed"));
    const keptOperations = [operation("runs", 1, "processing"), operation("failed", 2, "failed")];
    const state = after({ type: "operations.delta", seq: 2000, operations: [...keptOperations, ...ended] });
    expect(state.operations.size).toBe(302);
    expect(state.operations.has("runs") && state.operations.has("failed")).toBe(true);
    expect(state.operations.has("done-0")).toBe(false);
    expect([...state.operations.values()].filter(isActive)).toHaveLength(1);
  });

  it("knows the server's clock and a build that changed under the page", () => {
    const hello = { type: "hello", at: "2026-08-22T10:00:30Z", version: "1", user: { name: "a", role: "admin" } } as const;
    const state = after({ ...hello, build: "one" }, { ...hello, build: "two" });
    expect([state.skew, state.outdated]).toEqual([30_000, true]);
  });
});
