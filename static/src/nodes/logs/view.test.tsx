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
function shown(follows: boolean): { log: HTMLElement; said: ReturnType<typeof vi.fn> } {
  const said = vi.fn();
  render(<LogView lines={lines} term="" details={false} follows={follows} onFollows={said} label="log" />);
  const log = screen.getByRole("log");
  Object.defineProperty(log, "scrollHeight", { value: 1000, configurable: true });
  Object.defineProperty(log, "clientHeight", { value: 100, configurable: true });
  log.scrollTop = 900;
  fireEvent.scroll(log);
  said.mockClear();
  return { log, said };
}

describe("a log that follows", () => {
  it.each(["Home", "PageUp", "ArrowUp"])("stops at %s, before a pixel has moved", (key) => {
    const { log, said } = shown(true);
    fireEvent.keyDown(log, { key });
    expect(said).toHaveBeenCalledExactlyOnceWith(false);
  });

  it("stops at a wheel that turns up, and at no other", () => {
    const { log, said } = shown(true);
    fireEvent.wheel(log, { deltaY: 120 });
    expect(said).not.toHaveBeenCalled();
    fireEvent.wheel(log, { deltaY: -120 });
    expect(said).toHaveBeenCalledExactlyOnceWith(false);
  });

  it("stops at a scroll bar that is pulled up", () => {
    const { log, said } = shown(true);
    log.scrollTop = 500;
    fireEvent.scroll(log);
    expect(said).toHaveBeenCalledExactlyOnceWith(false);
  });
});

describe("a log that stays", () => {
  it("does not follow again while its reader is still close to the end on the way up", () => {
    const { log, said } = shown(false);
    log.scrollTop = 890;
    fireEvent.scroll(log);
    expect(said).not.toHaveBeenCalled();
  });

  it("follows again when the reader has come down to the end", () => {
    const { log, said } = shown(false);
    log.scrollTop = 400;
    fireEvent.scroll(log);
    said.mockClear();
    log.scrollTop = 895;
    fireEvent.scroll(log);
    expect(said).toHaveBeenCalledExactlyOnceWith(true);
  });
});
