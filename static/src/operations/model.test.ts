import { describe, expect, it } from "vitest";
import type { Operation } from "../live/messages";
import { at, byJob, install } from "./fixtures";
import { groups, type Group } from "./model";
import { headline, subjectOf, where } from "./summary";
import { phrase, stateOf } from "./words";

function grouped(operations: Operation[], previous: readonly Group[] = []): Group[] {
  return groups(operations, new Map(previous.map((group) => [group.id, group])));
}

function only(operations: Operation[], previous: readonly Group[] = []): Group {
  const result = grouped(operations, previous);
  expect(result).toHaveLength(1);
  return result[0] as Group;
}

const done = (node: string, created: number, finished: number) =>
  install(node, { status: "completed", createdAt: at(created), finishedAt: at(finished), progress: 100 });

describe("a group", () => {
  it("is one line for thirteen nodes, and counts those that are done (UI-1.5, UI-1.13)", () => {
    const ended = Array.from({ length: 7 }, (_, n) => done(`gpu-${n}`, 0, n + 1));
    const running = Array.from({ length: 6 }, (_, n) => install(`gpu-${n + 7}`, { createdAt: at(0.5), progress: 50 }));
    const group = only([...ended, ...running]);
    expect([headline(group), group.name, where(group)]).toEqual(["Installing backend", "echo", "7 of 13 nodes"]);
    expect(group.progress).toBeCloseTo((7 * 100 + 6 * 50) / 13);
  });

  it("counts the targets of one operation with several nodes", () => {
    const nodes = [
      { node_id: "a", node_name: "a", status: "success", percentage: 100 },
      { node_id: "b", node_name: "b", status: "queued", percentage: 40 },
    ] as const;
    const group = only([install("x", { nodes: [...nodes], progress: 99 })]);
    expect([where(group), group.progress]).toEqual(["1 of 2 nodes", 50]);
  });

  it("never says 100 before the last one has ended (UI-1.13)", () => {
    expect(only([install("a", { progress: 100 })]).progress).toBe(99);
  });

  it("remembers nothing of an earlier run of the same backend", () => {
    const group = only([done("old", -600, -500), install("a", { progress: 10 })]);
    expect([group.targets.length, group.progress]).toEqual([1, 10]);
  });

  it("does not go back when an attempt starts again, but says so when nodes come in", () => {
    const first = grouped([install("a", { progress: 60 })]);
    const next = grouped([install("a", { progress: 0, attempts: 1 })], first);
    expect(next[0]?.progress).toBe(60);
    expect(only([install("a", { progress: 60 }), install("b")], next).progress).toBe(30);
  });

  it("keeps its identity while nothing of it changes", () => {
    const operations = [install("a"), install("b")];
    const first = grouped(operations);
    expect(grouped(operations, first)[0]).toBe(first[0]);
  });

  it("stands for what was asked again, not for what failed before on that node", () => {
    const failed = install("a", { jobID: "first", status: "failed", dismissedAt: at(3), createdAt: at(0), finishedAt: at(2) });
    const group = only([failed, install("a", { jobID: "second", createdAt: at(3), progress: 5 })]);
    expect(group.targets.map((target) => [target.job.jobID, target.status])).toEqual([["second", "downloading"]]);
  });

  it("counts a node that failed, and measures the progress of the others", () => {
    const failed = install("b", { status: "failed", error: "no", finishedAt: at(1), progress: 10 });
    const [first] = grouped([install("a", { progress: 70 }), failed]);
    expect(first && [first.state, first.progress]).toEqual(["failed", 70]);
  });

  it("leaves out what was cancelled", () => {
    const cancelled = install("b", { status: "cancelled", finishedAt: at(1) });
    expect(where(only([install("a"), cancelled]))).toBe("on a");
  });

  it("sums bytes, and knows a total only if all that is under way know theirs", () => {
    const knownSize = install("a", { progress: 50 }, { current_bytes: 50, total_bytes: 100 });
    expect(only([knownSize, install("b", {}, { current_bytes: 5, total_bytes: 10 })])).toMatchObject({ current: 55, total: 110 });
    expect(only([knownSize, install("b", {}, { current_bytes: 5 })])).toMatchObject({ current: 55, total: 0 });
  });
});

describe("the order", () => {
  it("is failures first, then the least advanced (E15, E16, UI-1.2)", () => {
    const result = grouped([
      install("a", { name: "far", progress: 80 }),
      install("a", { jobID: "2", name: "near", progress: 10 }),
      install("a", { jobID: "3", name: "broken", status: "failed", error: "disk full" }),
    ]);
    expect(result.map((group) => group.name)).toEqual(["broken", "near", "far"]);
    expect(subjectOf(result[0] as Group)).toBe("disk full");
  });

  it("shows a model's load and the installation it waits for as two (O35)", () => {
    const load = install("a", { jobID: "l", kind: "model_load", name: "tiny", taskType: "staging", isBackend: false });
    expect(grouped([load, install("a")]).map(headline).sort()).toEqual(["Installing backend", "Loading model"]);
  });

  it("shows two loads of a model on one node as two", () => {
    const load = (jobID: string) => install("a", { jobID, kind: "model_load", name: "tiny", taskType: "staging", nodes: [] });
    const both = only([load("one"), load("two")]);
    expect(both.targets.map((target) => [target.job.jobID, target.nodeID])).toEqual([["one", "a"], ["two", "a"]]);
  });

  it("drops what was dismissed", () => {
    expect(grouped([install("a", { status: "failed", dismissedAt: at(1) })])).toEqual([]);
  });
});

describe("words", () => {
  it("tell a queued operation from one that waits for a reason, and give the reason (E21, UI-1.4)", () => {
    expect(headline(only([install("a", { status: "pending" })]))).toBe("Queued to install backend");
    const waits = only([install("a", { status: "waiting_for_nodes", message: "node gpu-3 is offline" })]);
    expect([headline(waits), subjectOf(waits)]).toEqual(["Waiting to install backend", "node gpu-3 is offline"]);
    expect(stateOf(install("a", { status: "pending", message: "its controller stopped", attempts: 1 }))).toBe("retrying");
  });

  it.each<[Partial<Operation>, string]>([
    [{ isDeletion: true, kind: "backend_delete" }, "Could not remove backend"],
    [{ taskType: "staging", kind: "model_load", isBackend: false }, "Could not load model"],
    [{}, "Could not install backend"],
  ])("have a phrase of its own for each kind that fails (UI-1.4, E12) %#", (overrides, text) => {
    expect(phrase(install("a", overrides), "failed")).toBe(text);
  });

  it("name each node that failed when it is one, and count them when there are more", () => {
    const operation = install("gpu-3", { status: "failed", error: "no space" });
    expect(where(only([operation]))).toBe("on gpu-3");
    expect(where(only([...byJob(operation, install("gpu-4", { status: "failed" })).values()]))).toBe("on 2 nodes");
  });
});
