// A uPlot drawing that follows the width of its place and the theme.
import { useEffect, useLayoutEffect, useRef, type RefObject } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { useDark } from "./theme";

const colours = new Map<string, string>();

/** A colour of the theme as it is now, read once for each theme: a read between two drawings computes all styles again. */
export function colour(name: string): string {
  const root = document.documentElement;
  const key = `${root.dataset["theme"] ?? ""} ${name}`;
  const value = colours.get(key) ?? getComputedStyle(root).getPropertyValue(name).trim();
  colours.set(key, value);
  return value;
}

interface Plot {
  place: RefObject<HTMLDivElement | null>;
  plot: RefObject<uPlot | null>;
}

/** `make` builds the options for a width, and anew when it changes; `marks` is what is drawn beside the data. */
export function usePlot(make: (width: number) => uPlot.Options, data: uPlot.AlignedData, marks?: unknown): Plot {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const width = useRef(0);
  const dark = useDark();
  // All charts are measured before one of them changes the page, or each would need a layout of its own.
  useLayoutEffect(() => {
    width.current = place.current?.clientWidth ?? 0;
  }, [make]);
  useEffect(() => {
    const element = place.current;
    if (element === null) return undefined;
    const options = make(width.current || 300);
    const drawn = new uPlot(options, [[], ...options.series.slice(1).map(() => [])], element);
    plot.current = drawn;
    // It also reports the width at the beginning, with which everything is drawn already.
    const watcher = new ResizeObserver(() => {
      if (element.clientWidth !== drawn.width) drawn.setSize({ width: element.clientWidth, height: options.height });
    });
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      drawn.destroy();
      plot.current = null;
    };
  }, [make]);
  useEffect(() => plot.current?.setData(data), [data, make]);
  // Without `false` it would set the scale that is drawn again, in place of the one of data that came a moment ago.
  useEffect(() => plot.current?.redraw(false), [dark, marks]);
  return { place, plot };
}
