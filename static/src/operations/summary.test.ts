import { describe, expect, it } from "vitest";
import type { Operation } from "../live/messages";
import { at, byJob, install } from "./fixtures";
import { groups, type Group } from "./model";
import { hasBar } from "./summary";
import { phaseOf } from "./words";

function only(operation: Operation): Group {
  const [group] = groups(byJob(operation).values(), new Map());
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

it("says of a load that it sends files", () => {
  expect(phaseOf(install("gpu-1", { kind: "model_load", status: "processing", phase: "staging" }))).toBe("sending files");
});
