import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { LiveStore } from "../live/store";
import { install } from "./fixtures";
import { Watch } from "./watch";

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

it("tells what is not known yet from nothing, and goes on when the clock is put back", () => {
  const store = new LiveStore();
  const watch = new Watch(store);
  const stop = watch.subscribe(() => undefined);
  expect(watch.read().isKnownTotal).toBe(false);
  store.push({ type: "operations.snapshot", seq: 1, operations: [] });
  vi.advanceTimersByTime(1000);
  expect([watch.read().isKnownTotal, watch.read().groups.length]).toEqual([true, 0]);
  vi.setSystemTime(Date.now() - 3_600_000);
  store.push({ type: "operations.delta", seq: 2, operations: [install("a")] });
  vi.advanceTimersByTime(1000);
  expect(watch.read().groups).toHaveLength(1);
  stop();
});
