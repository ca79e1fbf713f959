// Figures over time, of the cluster or of one model: an hour, a day or a week, or what a person has zoomed to.
import { useQueryClient } from "@tanstack/react-query";
import { useMemo, useState, type ReactNode } from "react";
import { bytes } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { Fetched, Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Chart, type ChartEvent } from "../ui/chart";
import { serverSeconds, useFigures, zoomRange, type Figures, type Range } from "./data";

const RANGES = { hour: 3600, day: 86400, week: 604800 } as const;
type RangeName = keyof typeof RANGES;
/** Part of a range by which a zoom may differ from it and still be the same: charts end on whole steps. */
const SAME_LENGTH = 0.05;

const EVENT_WORDS: Readonly<Record<string, string>> = { fell_silent: "lost contact", heard_again: "back online", deactivated: "shut down", marked_unhealthy: "unhealthy", marked_healthy: "healthy" };

interface Figure {
  title: string;
  /** The figure's name in the response. */
  name: string;
  format: (value: number) => string;
  /** A sum for each step, shown by the second. */
  isCount?: boolean;
  /** The top of the scale, or the name of the figure that has it. */
  top?: number | string;
}

const perSecond = (value: number) => `${decimal(value)}/s`;
const CHARTS: readonly Figure[] = [
  { title: "Requests", name: "requests", format: perSecond, isCount: true },
  { title: "Tokens of answers", name: "completion_tokens", format: perSecond, isCount: true },
  { title: "Time to first token", name: "first_token", format: (value) => `${decimal(value)} s` },
  { title: "Errors", name: "errors", format: perSecond, isCount: true },
  { title: "GPUs busy", name: "busy", format: (value) => `${Math.round(value)}%`, top: 100 },
  { title: "VRAM used", name: "vram_used", format: bytes, top: "vram_total" },
  { title: "RAM used", name: "ram_used", format: bytes, top: "ram_total" },
  { title: "GPU power", name: "power", format: (value) => (value < 1000 ? `${Math.round(value)} W` : `${decimal(value / 1000)} kW`) },
];

function decimal(value: number): string {
  return new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" }).format(value);
}

/** `model`: absent for the cluster. */
export function Charts({ model = "" }: { model?: string }): ReactNode {
  const [name, setName] = useInAddress(readRange, writeRange);
  const [zoom, setZoom] = useState<Range | null>(null);
  const queries = useQueryClient();
  const range: Range = zoom ?? { last: RANGES[name] };
  const query = useFigures(model === "" ? "cluster" : "model", model, range);
  const zoomTo = (from: number, to: number) => {
    const zoomed = zoomRange(from, to, serverSeconds(queries));
    const isChosen = "last" in zoomed && Math.abs(zoomed.last / RANGES[name] - 1) < SAME_LENGTH;
    setZoom(isChosen ? null : zoomed);
  };
  const choices = (
    <div className="row" role="group" aria-label="Time shown">
      {zoom !== null && (
        <Button small onClick={() => setZoom(null)}>
          Reset zoom
        </Button>
      )}
      {Object.keys(RANGES).map((choice) => (
        <Button
          key={choice}
          small
          className="chip"
          aria-pressed={zoom === null && choice === name}
          onClick={() => {
            setZoom(null);
            setName(choice as RangeName);
          }}
        >
          {choice === "hour" ? "Hour" : choice === "day" ? "Day" : "Week"}
        </Button>
      ))}
    </div>
  );
  return (
    <Panel title="Over time" aside={choices}>
      <Fetched query={query} subject="the figures over time">
        {(figures) => <Drawn figures={figures} onZoom={zoomTo} />}
      </Fetched>
    </Panel>
  );
}

function readRange(query: URLSearchParams): RangeName {
  const name = query.get("range") ?? "";
  return Object.hasOwn(RANGES, name) ? (name as RangeName) : "hour";
}

function writeRange(name: RangeName): URLSearchParams {
  return new URLSearchParams(name === "hour" ? {} : { range: name });
}

function Drawn({ figures, onZoom }: { figures: Figures; onZoom: (from: number, to: number) => void }): ReactNode {
  const start = Date.parse(figures.from) / 1000;
  const events = useMemo<readonly ChartEvent[]>(
    () => figures.events.map(({ at, kind, node_name: node }) => ({ at: Date.parse(at) / 1000, text: `${node} ${EVENT_WORDS[kind] ?? kind.replaceAll("_", " ")}` })),
    [figures],
  );
  const shown = useMemo(
    () =>
      CHARTS.flatMap((figure) => {
        const values = valuesOf(figures, figure.name);
        if (!values.some((value) => value !== null) && figure.isCount !== true && figure.name !== "first_token") return [];
        const top = typeof figure.top === "string" ? Math.max(0, ...valuesOf(figures, figure.top).filter((value) => value !== null)) : figure.top;
        const perStep = figure.isCount === true ? figures.step : 1;
        return [{ figure, top: top === 0 ? undefined : top, lines: [{ label: figure.title, values: values.map((value) => (value === null ? null : value / perStep)) }] }];
      }),
    [figures],
  );
  return (
    <div className="ov-charts">
      {shown.map(({ figure, top, lines }) => (
        <Chart key={figure.name} title={figure.title} start={start} step={figures.step} lines={lines} format={figure.format} events={events} onZoom={onZoom} {...(top === undefined ? {} : { top })} />
      ))}
    </div>
  );
}

function valuesOf(figures: Figures, name: string): readonly (number | null)[] {
  return figures.figures.find((figure) => figure.name === name && figure.gpu === null)?.values ?? [];
}
