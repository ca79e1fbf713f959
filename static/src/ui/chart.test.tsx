import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { afterEach, beforeAll, expect, it, vi } from "vitest";
import { Chart, isolatedIndices, stepText, type ChartProps } from "./chart";

const drawn = { width: 500, setData: vi.fn(), setSize: vi.fn(), redraw: vi.fn(), destroy: vi.fn(), setCursor: vi.fn(), valToPos: (at: number) => at };
vi.mock("uplot", () => ({
  default: vi.fn(function () {
    return drawn;
  }),
}));

beforeAll(() => {
  globalThis.ResizeObserver = class {
    observe() {}
    unobserve() {}
    disconnect() {}
  };
});
afterEach(cleanup);

const START = Date.parse("2026-08-22T10:00:00Z") / 1000;
const PROPS: ChartProps = {
  title: "GPU busy",
  start: START,
  step: 60,
  lines: [
    { label: "GPU 0", values: [10, 20, null, 40] },
    { label: "GPU 1", values: [1, 2, 3, 4] },
  ],
  format: (value) => `${value}%`,
  events: [{ at: START + 70, text: "gpu-a lost contact" }],
};

it("says the value of each line and the events of a step", () => {
  expect(stepText(PROPS, 1)).toMatch(/: GPU 0 20%, GPU 1 2%, gpu-a lost contact$/);
  expect(stepText(PROPS, 2)).toMatch(/: GPU 0 unknown, GPU 1 3%$/);
  expect(stepText({ ...PROPS, lines: PROPS.lines.slice(0, 1) }, 0)).toMatch(/: 10%$/);
});

it("draws values without neighbours as points", () => {
  expect(isolatedIndices([null, 2, null, 4, 5, null, 7])).toEqual([1, 6]);
  expect(isolatedIndices([1, null, 0, null])).toEqual([0, 2]);
  expect(isolatedIndices([1, 2])).toEqual([]);
  expect(isolatedIndices([])).toEqual([]);
});

it("is read and zoomed by keyboard", () => {
  const onZoom = vi.fn();
  render(<Chart {...PROPS} onZoom={onZoom} />);
  const slider = screen.getByRole("slider", { name: "GPU busy" });
  const now = () => slider.getAttribute("aria-valuenow");
  expect(now()).toBe("3");
  fireEvent.keyDown(slider, { key: "ArrowLeft" });
  expect(now()).toBe("2");
  expect(slider.getAttribute("aria-valuetext")).toContain("GPU 0 unknown");
  fireEvent.keyDown(slider, { key: "Home" });
  fireEvent.keyDown(slider, { key: "ArrowLeft" });
  expect(now()).toBe("0");
  fireEvent.keyDown(slider, { key: "PageUp" });
  expect(now()).toBe("3");
  // Twice the length around the chosen step; the owner of the range knows the time and clips it.
  fireEvent.keyDown(slider, { key: "-" });
  expect(onZoom).toHaveBeenCalledWith(START + 180 - 240, START + 180 + 240);
  fireEvent.keyDown(slider, { key: "+" });
  expect(onZoom).toHaveBeenCalledTimes(1);
});

it("keeps the scale of data that came a moment ago when events are drawn", () => {
  render(<Chart {...PROPS} />);
  expect(new Set(drawn.redraw.mock.calls.map(([isRebuilt]: unknown[]) => isRebuilt))).toEqual(new Set([false]));
});

it("says that nothing is known", () => {
  render(<Chart {...PROPS} lines={[]} />);
  expect(screen.getByRole("slider").getAttribute("aria-valuetext")).toBe("no data");
});

it("is not drawn a second time for the width that it has", () => {
  let report: () => void = () => undefined;
  vi.stubGlobal(
    "ResizeObserver",
    class {
      constructor(callback: () => void) {
        report = callback;
      }
      observe() {}
      disconnect() {}
    },
  );
  vi.spyOn(HTMLElement.prototype, "clientWidth", "get").mockReturnValueOnce(500).mockReturnValueOnce(500).mockReturnValue(400);
  drawn.setSize.mockClear();
  render(<Chart {...PROPS} />);
  report();
  expect(drawn.setSize).not.toHaveBeenCalled();
  report();
  expect(drawn.setSize).toHaveBeenCalledWith({ width: 400, height: 160 });
  vi.unstubAllGlobals();
});
