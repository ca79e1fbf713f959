import { act, cleanup, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import type { ReactNode } from "react";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { Ago } from "./time";

const START = Date.parse("2026-11-30T12:00:00Z");

beforeEach(() => void vi.useFakeTimers({ now: START }));
afterEach(() => {
  cleanup();
  vi.useRealTimers();
});

function around(child: ReactNode): ReactNode {
  return (
    <LiveContext.Provider value={new LiveStore()}>
      <Tooltip.Provider>{child}</Tooltip.Provider>
    </LiveContext.Provider>
  );
}

it("never puts an event that has just been reported into the future", () => {
  const { rerender } = render(around(<Ago at={new Date(START - 60_000).toISOString()} />));
  act(() => void vi.advanceTimersByTime(4000));
  rerender(around(<Ago at={new Date(START + 4000).toISOString()} />));
  expect(screen.getByText("just now")).toBeTruthy();
});

it("counts on from the moment that is shown", () => {
  render(around(<Ago at={new Date(START).toISOString()} />));
  act(() => void vi.advanceTimersByTime(5000));
  expect(screen.getByText("5s ago")).toBeTruthy();
});
