import { describe, expect, it } from "vitest";
import { duration } from "../lib/format";
import { addressOf, choiceIn, endedOf, EVERYTHING, finds, showIn, shows, tookOf } from "./filter";
import { at, install } from "./fixtures";
import { outcome } from "./words";

describe("the filter", () => {
  it("is in the address, and everything for a word that is none", () => {
    expect(showIn(new URLSearchParams("show=backends"))).toBe("backends");
    expect(showIn(new URLSearchParams("show=<b>"))).toBe("all");
  });

  it("finds by name, node, actor and error: every word, in any case", () => {
    const failed = install("gpu-1", { name: "whisper", actor: "ann", error: "no space left" });
    for (const q of ["", "  ", "WHISPER gpu", "ann space"]) expect(finds(q, failed)).toBe(true);
    expect(finds("whisper gpu-2", failed)).toBe(false);
    const choice = { show: "models", q: "gpu 1" } as const;
    expect(choiceIn(addressOf(choice))).toEqual(choice);
    expect(addressOf(EVERYTHING).toString()).toBe("");
  });

  it("tells models, backends and what happens on nodes apart (E13)", () => {
    const load = install("a", { kind: "model_load", isBackend: false, taskType: "staging" });
    expect(["models", "backends", "cluster"].map((show) => shows(show as "models", load))).toEqual([true, false, true]);
    expect(["models", "backends", "cluster"].map((show) => shows(show as "models", install("a")))).toEqual([false, true, true]);
    const stop = install("a", { kind: "node_stop", isBackend: false });
    expect(["models", "backends", "cluster"].map((show) => shows(show as "models", stop))).toEqual([false, false, true]);
  });
});

describe("what has ended", () => {
  it("is what ended well, was cancelled or dismissed, latest first, and in no other section (E3, E4)", () => {
    const ended = [
      install("a", { status: "completed", finishedAt: at(1) }),
      install("b", { status: "failed", finishedAt: at(2) }),
      install("c", { status: "failed", finishedAt: at(3), dismissedAt: at(4) }),
      install("d", { status: "cancelled", finishedAt: at(5) }),
      install("f"),
    ];
    expect(endedOf(ended).map((operation) => operation.nodeName)).toEqual(["d", "c", "a"]);
  });

  it("says what it was: a cancelled removal reads cancelled, one that took no time says so (E10, E11)", () => {
    const cancelled = install("a", { status: "cancelled", isDeletion: true, kind: "backend_delete" });
    expect(outcome(cancelled, "3s")).toBe("cancelled");
    const quick = install("a", { status: "completed", startedAt: at(1), finishedAt: at(1) });
    expect(outcome(quick, duration(tookOf(quick)))).toBe("installed in < 1s");
    const absurd = install("a", { status: "completed", startedAt: "0001-01-01T00:00:00Z", finishedAt: at(1) });
    expect(outcome(absurd, duration(tookOf(absurd)))).toBe("installed");
  });
});
