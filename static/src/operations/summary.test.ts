import { describe, expect, it } from "vitest";
import type { Operation } from "../live/messages";
import { at, byJob, install } from "./fixtures";
import { groups, type Group } from "./model";
import { hasBar, where } from "./summary";
import { phaseOf } from "./words";

function only(...operations: Operation[]): Group {
  const [group] = groups(byJob(...operations).values(), new Map());
  if (group === undefined) throw new Error("it is gone");
  return group;
}

describe("bar and percent (UI-1.6)", () => {
  it.each<[string, Partial<Operation>, boolean]>([
    ["runs", { progress: 40 }, true],
    ["has sent everything, and goes on", { progress: 100 }, true],
    ["has not begun", { progress: 0 }, false],
    ["is queued", { status: "pending", progress: 40 }, false],
    ["waits", { status: "waiting_for_nodes", progress: 40, message: "node gpu-3 is offline" }, false],
    ["failed", { status: "failed", progress: 40, finishedAt: at(1) }, false],
  ])("of what %s: %#", (_, overrides, expected) => expect(hasBar(only(install("gpu-1", overrides)))).toBe(expected));

  it("are gone with what has finished", () => {
    expect(groups(byJob(install("gpu-1", { status: "completed" })).values(), new Map())).toEqual([]);
  });
});

describe("the nodes of several loads of a model", () => {
  const load = (jobID: string, node: string, overrides: Partial<Operation> = {}) =>
    install(node, { jobID, kind: "model_load", name: "tiny", taskType: "staging", nodes: [], ...overrides });
  const placeOf = (...operations: Operation[]) => where(only(...operations));

  it("count once each (UI-1.5)", () => {
    expect(placeOf(load("1", "a"), load("2", "a"))).toBe("to a");
    expect(placeOf(load("1", "a", { status: "completed", finishedAt: at(1) }), load("2", "a"), load("3", "b"))).toBe("0 of 2 nodes");
    expect(placeOf(load("1", "a", { status: "completed", finishedAt: at(1) }), load("2", "b"), load("3", "b"))).toBe("1 of 2 nodes");
  });

  it("count once each where they failed, and only nodes that are known", () => {
    const failed = { status: "failed", error: "no", finishedAt: at(1) } as const;
    expect(placeOf(load("1", "a", failed), load("2", "a", failed))).toBe("to a");
    expect(placeOf(load("1", "a", failed), load("2", "", { ...failed, nodeName: "" }))).toBe("to a");
  });

  it("count as one each while they are not known", () => {
    expect(placeOf(load("1", "", { nodeName: "" }), load("2", "a"))).toBe("0 of 2 nodes");
  });
});

it("says of a load that it sends files", () => {
  expect(phaseOf(install("gpu-1", { kind: "model_load", status: "processing", phase: "staging" }))).toBe("sending files");
});
