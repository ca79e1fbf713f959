import { act, cleanup, renderHook } from "@testing-library/react";
import type { ReactNode } from "react";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { node, show } from "../live/fixtures";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { useThrottledNodes } from "./throttled-nodes";

beforeEach(() => void vi.useFakeTimers());

afterEach(() => {
  cleanup();
  vi.useRealTimers();
});

it("shows the first nodes at once and later ones at most twice a second", () => {
  const store = new LiveStore();
  const wrapper = ({ children }: { children: ReactNode }) => <LiveContext value={store}>{children}</LiveContext>;
  const { result } = renderHook(() => useThrottledNodes(), { wrapper });
  act(() => void vi.advanceTimersByTime(20));
  expect(result.current.size).toBe(0);
  act(() => void show(store, node("n1")));
  act(() => void vi.advanceTimersByTime(20));
  expect([...result.current.keys()]).toEqual(["n1"]);
  act(() => void show(store, node("n1"), node("n2")));
  act(() => void vi.advanceTimersByTime(400));
  expect(result.current.size).toBe(1);
  act(() => void vi.advanceTimersByTime(200));
  expect(result.current.size).toBe(2);
});
