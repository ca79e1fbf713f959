// Figures over time: lines, events as marks, zoom by dragging, and every value by keyboard. The chart is a slider over
// its times: the arrows move it, and the values at its place are written below the drawing and spoken.
import { useCallback, useEffect, useId, useMemo, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import type uPlot from "uplot";
import { bytes } from "../lib/format";
import { colour, usePlot } from "./plot";

export interface ChartLine {
  label: string;
  values: readonly (number | null)[];
}

export interface ChartEvent {
  /** Seconds since 1970. */
  at: number;
  text: string;
}

export interface ChartProps {
  title: string;
  /** Seconds since 1970 of the first value. */
  start: number;
  /** Seconds between two values. */
  step: number;
  lines: readonly ChartLine[];
  format: (value: number) => string;
  /** The top of the scale; the largest value unless given. */
  top?: number;
  events?: readonly ChartEvent[];
  /** A person wants to see the time between these seconds, which may reach past now: the chart does not know it. */
  onZoom?: (from: number, to: number) => void;
}

const HEIGHT = 160;
const DAY_S = 86400;
/** Steps that a zoom must leave. */
const LEAST_STEPS = 4;
const COLOURS = ["--bar-used", "--bar-reserved", "--good", "--bar-tight", "--bar-full", "--info", "--text-2", "--accent"];
// A format takes longer to make than to use.
const DATE = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const TIME = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const TO_THE_SECOND = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
const TO_THE_MINUTE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" });
/** Distances of two marks on a scale of bytes, which are shown in binary units. */
const POWERS_OF_TWO = Array.from({ length: 60 }, (_, power) => 2 ** power);
const NO_EVENTS: readonly ChartEvent[] = [];

function colourOf(index: number): string {
  return COLOURS[index % COLOURS.length] ?? "--text-2";
}

/** The label of a time on an axis whose marks are `everyS` seconds apart. */
function timeLabel(at: number, everyS: number): string {
  return (everyS >= DAY_S ? DATE : TIME).format(at * 1000);
}

/** The time, the value of each line, and the events of one step. */
export function stepText({ start, step, lines, format, events = NO_EVENTS }: ChartProps, index: number): string {
  const at = start + index * step;
  const time = (step < 60 ? TO_THE_SECOND : TO_THE_MINUTE).format(at * 1000);
  const values = lines.map(({ label, values }) => {
    const value = values[index] ?? null;
    return `${lines.length > 1 ? `${label} ` : ""}${value === null ? "unknown" : format(value)}`;
  });
  const happened = events.filter((event) => event.at >= at && event.at < at + step).map(({ text }) => text);
  return `${time}: ${[...values, ...happened].join(", ")}`;
}

interface Hooks {
  top: number | undefined;
  current: () => ChartProps;
  onHover: (index: number | null) => void;
}

function options(width: number, labels: readonly string[], { top, current, onHover }: Hooks): uPlot.Options {
  const axis = { stroke: () => colour("--text-3"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    // On the right: half of a time below the last mark.
    padding: [8, 24, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: true }, y: { range: (_, __, max) => [0, top ?? (Math.max(max, 0) * 1.05 || 1)] } },
    axes: [
      { ...axis, size: 28, values: (_, splits, __, ___, every) => splits.map((at) => timeLabel(at, every)) },
      { ...axis, size: 72, ...(current().format === bytes ? { incrs: POWERS_OF_TWO } : {}), values: (_, splits) => splits.map((value) => current().format(value)) },
    ],
    series: [
      {},
      ...labels.map((label, index) => ({
        label,
        // A line of one pixel is drawn several times as fast as a wider one, whose outline has to be filled.
        width: 1,
        stroke: () => colour(colourOf(index)),
        points: { show: false, filter: (plot: uPlot, line: number) => isolatedIndices(plot.data[line] ?? []), size: 4 },
      })),
    ],
    hooks: {
      setCursor: [(plot) => onHover(plot.cursor.idx ?? null)],
      setSelect: [
        (plot) => {
          const { onZoom, step } = current();
          const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (from !== undefined && to !== undefined && to - from >= LEAST_STEPS * step) onZoom?.(from, to);
        },
      ],
      draw: [(plot) => drawEvents(plot, current().events ?? NO_EVENTS)],
    },
  };
}

/** The indices of the values whose neighbours are null: no line leads to them, so they are drawn as points. */
export function isolatedIndices(values: ArrayLike<number | null | undefined>): number[] {
  const has = (index: number) => (values[index] ?? null) !== null;
  return Array.from({ length: values.length }, (_, index) => index).filter((index) => has(index) && !has(index - 1) && !has(index + 1));
}

function drawEvents(plot: uPlot, events: readonly ChartEvent[]): void {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour("--warn");
  ctx.setLineDash([4, 4]);
  for (const { at } of events) {
    const x = plot.valToPos(at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** The index that a key leads to, or undefined. */
function indexAfter(key: string, index: number, last: number): number | undefined {
  const next = { ArrowLeft: index - 1, ArrowRight: index + 1, ArrowDown: index - 1, ArrowUp: index + 1, PageDown: index - 10, PageUp: index + 10, Home: 0, End: last }[key];
  return next === undefined ? undefined : Math.min(Math.max(next, 0), last);
}

export function Chart(props: ChartProps): ReactNode {
  const { title, start, step, lines, top, events = NO_EVENTS, onZoom } = props;
  const id = useId();
  const latest = useRef(props);
  const [index, setIndex] = useState<number | null>(null);
  const size = lines[0]?.values.length ?? 0;
  const last = Math.max(size - 1, 0);
  const labels = lines.map(({ label }) => label);
  const labelText = labels.join("\n");
  const data = useMemo<uPlot.AlignedData>(
    () => [Array.from({ length: size }, (_, number) => start + number * step), ...(lines.length === 0 ? [[]] : lines.map(({ values }) => [...values]))],
    [start, step, size, lines],
  );
  useEffect(() => {
    latest.current = props;
  });
  const make = useCallback((width: number) => options(width, labelText.split("\n"), { top, current: () => latest.current, onHover: setIndex }), [labelText, top]);
  const { place, plot } = usePlot(make, data, events);

  const at = Math.min(index ?? last, last);
  const press = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const next = indexAfter(event.key, at, last);
    const zoom = { "+": 0.25, "-": 1 }[event.key];
    if (next !== undefined) {
      setIndex(next);
      const drawn = plot.current;
      drawn?.setCursor({ left: drawn.valToPos(start + next * step, "x"), top: 0 }, false);
    } else if (zoom !== undefined && onZoom !== undefined && size * zoom * 2 >= LEAST_STEPS) {
      const middle = start + at * step;
      onZoom(middle - zoom * size * step, middle + zoom * size * step);
    } else return;
    event.preventDefault();
  };
  const text = size === 0 ? "no data" : stepText(props, at);
  const slider = { role: "slider", tabIndex: 0, "aria-labelledby": id, "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": at, "aria-valuetext": text, onKeyDown: press };
  return (
    <Frame title={<figcaption id={id}>{title}</figcaption>} labels={labels} values={size === 0 ? "No data." : text}>
      <div ref={place} className="chart-place" {...slider} />
    </Frame>
  );
}

/** The place of a chart whose values are loading: as high as the chart. */
export function ChartPlaceholder({ title, labels }: { title: string; labels: readonly string[] }): ReactNode {
  return (
    <Frame title={<figcaption>{title}</figcaption>} labels={labels} values="Loading…">
      <div className="chart-place" />
    </Frame>
  );
}

/** Values of this many lines of the chart take one more line of text. */
const VALUES_A_ROW = 3;

/** What is around a drawing; its height depends on the labels and not on the values. */
function Frame({ title, labels, values, children }: { title: ReactNode; labels: readonly string[]; values: string; children: ReactNode }): ReactNode {
  return (
    <figure className="chart">
      {title}
      {children}
      <p className="chart-values muted" aria-hidden="true" style={{ minHeight: `${1 + Math.ceil(Math.max(labels.length, 1) / VALUES_A_ROW)}lh` }}>
        {values}
      </p>
      {labels.length > 1 && (
        <ul className="chart-legend" aria-hidden="true">
          {labels.map((label, number) => (
            <li key={label}>
              <svg width="10" height="10">
                <rect width="10" height="10" rx="2" fill={`var(${colourOf(number)})`} />
              </svg>
              {label}
            </li>
          ))}
        </ul>
      )}
    </figure>
  );
}
