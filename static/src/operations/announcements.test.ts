import { describe, expect, it } from "vitest";
import type { Operation } from "../live/messages";
import { ends, spoken } from "./announcements";
import { at, byJob, install } from "./fixtures";

const running = install("gpu-1");
const completed = install("gpu-1", { status: "completed", finishedAt: at(5) });

describe("ends", () => {
  it("are told when the feed says so, in words that fit the work (E23, UI-1.10)", () => {
    expect(ends(byJob(running), byJob(completed))).toEqual([
      { group: "backend_install echo", tone: "good", text: "Installed backend echo on gpu-1" },
    ]);
    const removed = install("gpu-1", { status: "completed", kind: "backend_delete", isDeletion: true });
    expect(ends(byJob(), byJob(removed))[0]?.text).toBe("Removed backend echo on gpu-1");
  });

  it("are not announced for what is merely gone, nor for what had ended when the page was opened (E22)", () => {
    expect(ends(byJob(running), byJob())).toEqual([]);
    expect(ends(null, byJob(completed))).toEqual([]);
  });

  it("say nothing of success when it was cancelled (E22)", () => {
    const [end] = ends(byJob(running), byJob(install("gpu-1", { status: "cancelled" })));
    expect([end?.tone, end?.text]).toEqual(["quiet", "Cancelled: install backend echo on gpu-1"]);
  });

  it("of thirteen nodes tell the last, for all", () => {
    const otherOperation = install("gpu-2");
    expect(ends(byJob(running, otherOperation), byJob(completed, otherOperation))).toEqual([]);
    const last = install("gpu-2", { status: "completed", finishedAt: at(9) });
    expect(ends(byJob(completed, otherOperation), byJob(completed, last))[0]?.text).toBe("Installed backend echo on 2 nodes");
  });

  it("count a node once, however many replicas were loaded to it", () => {
    const load = (jobID: string, node: string, overrides: Partial<Operation> = {}) =>
      install(node, { jobID, kind: "model_load", name: "tiny", taskType: "staging", nodes: [], createdAt: at(0), ...overrides });
    const ended = { status: "completed", finishedAt: at(5) } as const;
    const text = (...after: ReturnType<typeof load>[]) => ends(byJob(load("1", "a")), byJob(...after))[0]?.text;
    expect(text(load("1", "a", ended), load("2", "a", ended))).toBe("Loaded model tiny to a");
    const failed = load("3", "b", { status: "failed", dismissedAt: at(4), finishedAt: at(3) });
    expect(text(load("1", "a", ended), load("2", "a", ended), failed)).toBe("Loaded model tiny on 1 of 2 nodes");
  });

  it("give a failure's reason at once, and do not count it as done", () => {
    const otherOperation = install("gpu-2");
    const failed = install("gpu-1", { status: "failed", error: "no space left", finishedAt: at(2) });
    expect(ends(byJob(running, otherOperation), byJob(failed, otherOperation))).toEqual([
      { group: "backend_install echo", tone: "bad", text: "Could not install backend echo on gpu-1: no space left" },
    ]);
    const last = install("gpu-2", { status: "completed", finishedAt: at(9) });
    expect(ends(byJob(failed, otherOperation), byJob(failed, last))[0]?.text).toBe("Installed backend echo on 1 of 2 nodes");
  });

  it("are told when something else begins at the same moment: their number is the same (UI-0.10)", () => {
    const next = install("gpu-2", { name: "other" });
    expect(ends(byJob(running), byJob(completed, next)).map((end) => end.text)).toEqual(["Installed backend echo on gpu-1"]);
    const replaced = install("gpu-1", { jobID: "another", createdAt: at(9) });
    expect(ends(byJob(completed), byJob(replaced))).toEqual([]);
  });

  it("are told once", () => {
    const after = byJob(completed);
    expect(ends(after, new Map(after))).toEqual([]);
    expect(ends(after, byJob(install("gpu-1", { status: "completed", seq: 99 })))).toEqual([]);
  });
});

describe("what is said aloud", () => {
  it("is one saying for one moment, and not a worker's whole log", () => {
    const end = (text: string) => ({ group: text, tone: "bad" as const, text });
    expect(spoken([end("one"), end("two")])).toBe("one. two");
    expect(spoken(["a", "b", "c", "d", "e"].map(end))).toBe("a. b. c. 2 more finished");
    expect(spoken([end("x".repeat(5000))]).length).toBeLessThan(210);
  });
});
