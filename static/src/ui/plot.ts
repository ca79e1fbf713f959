// A uPlot drawing that follows the width of its place and the theme.
import { useEffect, useRef, type RefObject } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { useDark } from "./theme";

/** A colour of the theme as it is now. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

interface Plot {
  place: RefObject<HTMLDivElement | null>;
  plot: RefObject<uPlot | null>;
}

/** `make` builds the options for a width, and anew when it changes; `marks` is what is drawn beside the data. */
export function usePlot(make: (width: number) => uPlot.Options, data: uPlot.AlignedData, marks?: unknown): Plot {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = useDark();
  useEffect(() => {
    const element = place.current;
    if (element === null) return undefined;
    const options = make(element.clientWidth || 300);
    const drawn = new uPlot(options, [[], ...options.series.slice(1).map(() => [])], element);
    plot.current = drawn;
    const watcher = new ResizeObserver(() => drawn.setSize({ width: element.clientWidth, height: options.height }));
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
