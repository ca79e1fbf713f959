import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { afterEach, describe, expect, it, vi } from "vitest";
import type { Line } from "./lines";
import { LogView } from "./view";

vi.stubGlobal(
  "ResizeObserver",
  class {
    observe(): void {}
    disconnect(): void {}
  },
);
afterEach(cleanup);

const lines: Line[] = [{ number: 1, timestamp: "2026-11-21T00:00:00Z", stream: "stdout", text: "one" }];

/** A log of 1,000 pixels in a window of 100, at its end; what it says of following. */
function shown(isFollowing: boolean): { log: HTMLElement; onFollowing: ReturnType<typeof vi.fn> } {
  const onFollowing = vi.fn();
  render(<LogView lines={lines} term="" details={false} isFollowing={isFollowing} onFollowing={onFollowing} label="log" />);
  const log = screen.getByRole("log");
  Object.defineProperty(log, "scrollHeight", { value: 1000, configurable: true });
  Object.defineProperty(log, "clientHeight", { value: 100, configurable: true });
  log.scrollTop = 900;
  fireEvent.scroll(log);
  onFollowing.mockClear();
  return { log, onFollowing };
}

describe("a log that follows", () => {
  it.each(["Home", "PageUp", "ArrowUp"])("stops at %s, before a pixel has moved", (key) => {
    const { log, onFollowing } = shown(true);
    fireEvent.keyDown(log, { key });
    expect(onFollowing).toHaveBeenCalledExactlyOnceWith(false);
  });

  it("stops at a wheel that turns up, and at no other", () => {
    const { log, onFollowing } = shown(true);
    fireEvent.wheel(log, { deltaY: 120 });
    expect(onFollowing).not.toHaveBeenCalled();
    fireEvent.wheel(log, { deltaY: -120 });
    expect(onFollowing).toHaveBeenCalledExactlyOnceWith(false);
  });

  it("stops at a scroll bar that is pulled up", () => {
    const { log, onFollowing } = shown(true);
    log.scrollTop = 500;
    fireEvent.scroll(log);
    expect(onFollowing).toHaveBeenCalledExactlyOnceWith(false);
  });
});

describe("a log that stays", () => {
  it("does not follow again while its reader is still close to the end on the way up", () => {
    const { log, onFollowing } = shown(false);
    log.scrollTop = 890;
    fireEvent.scroll(log);
    expect(onFollowing).not.toHaveBeenCalled();
  });

  it("follows again when the reader has come down to the end", () => {
    const { log, onFollowing } = shown(false);
    log.scrollTop = 400;
    fireEvent.scroll(log);
    onFollowing.mockClear();
    log.scrollTop = 895;
    fireEvent.scroll(log);
    expect(onFollowing).toHaveBeenCalledExactlyOnceWith(true);
  });
});
