import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { node } from "./fixtures";
import { LiveStore } from "./store";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("messages that wait for a frame", () => {
  it("do not say afterwards that a feed is live which has ended", () => {
    const store = new LiveStore();
    store.push({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1")] });
    store.lost("signed-out");
    vi.runAllTimers();
    expect([store.read().connection, store.read().nodes.size]).toEqual(["signed-out", 1]);
    expect(store.read().staleSince).not.toBeNull();
  });

  it("are taken without one: a tab that is hidden in between draws none", () => {
    vi.stubGlobal("requestAnimationFrame", () => 1);
    const store = new LiveStore();
    store.push({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1")] });
    vi.advanceTimersByTime(1000);
    expect(store.read().nodes.size).toBe(1);
    vi.unstubAllGlobals();
  });
});
