// The drawing of one figure over time. uPlot comes with this file, which is loaded when a node is opened.
import { useCallback, useMemo, type ReactNode } from "react";
import type uPlot from "uplot";
import { colour, usePlot } from "../../ui/plot";

const HEIGHT = 56;
/** Seconds that are drawn at least: what is known of them stands at their beginning. */
const SHORTEST_S = 60;

interface SparkProps {
  at: readonly number[];
  values: readonly (number | null)[];
  /** The top of the scale. */
  total: number;
}

/** From the first sample on; uPlot's own answer for a single one is a century. */
function stretch(plot: uPlot): [number, number] {
  const [at] = plot.data;
  const first = at[0] ?? 0;
  return [first, Math.max(at.at(-1) ?? 0, first + SHORTEST_S)];
}

function options(width: number, total: number): uPlot.Options {
  return {
    width,
    height: HEIGHT,
    padding: [2, 0, 2, 0],
    cursor: { show: false },
    legend: { show: false },
    axes: [{ show: false }, { show: false }],
    scales: { x: { time: false, range: stretch }, y: { range: [0, total] } },
    series: [
      {},
      {
        width: 1.5,
        stroke: () => colour("--bar-used"),
        fill: () => colour("--accent-soft"),
        // A single sample between two gaps would not be seen as a line.
        points: { show: (_, __, first, last) => last - first < 2, size: 4 },
      },
    ],
  };
}

/** Hidden from assistive tech: the text beside it has the same figures. */
export default function Spark({ at, values, total }: SparkProps): ReactNode {
  const make = useCallback((width: number) => options(width, total), [total]);
  const { place } = usePlot(make, useMemo(() => [[...at], [...values]], [at, values]));
  return <div ref={place} className="nd-spark" aria-hidden="true" />;
}
