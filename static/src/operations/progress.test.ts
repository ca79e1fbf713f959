import { describe, expect, it } from "vitest";
import { at, byJob, install } from "./fixtures";
import { groups, type Group } from "./model";

function after(previous: Group[], ...operations: Parameters<typeof byJob>): Group[] {
  return groups(byJob(...operations).values(), new Map(previous.map((group) => [group.id, group])));
}

describe("the progress of a group", () => {
  it("does not go back while the same work is under way", () => {
    const previous = after([], install("a", { progress: 60 }));
    expect(after(previous, install("a", { progress: 40 }))[0]?.progress).toBe(60);
  });

  it("begins again with new work on the same node", () => {
    const previous = after([], install("a", { progress: 90 }));
    const done = install("a", { status: "completed", createdAt: at(0), finishedAt: at(4) });
    const [group] = after(previous, done, install("a", { jobID: "next", createdAt: at(5), progress: 3 }));
    expect(group?.progress).toBe(3);
  });
});
