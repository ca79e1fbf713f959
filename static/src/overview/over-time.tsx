// Figures over time as charts: an hour, a day or a week, or what a person has zoomed to, with the events of nodes.
import { useMemo, useState, type ReactNode } from "react";
import { useInAddress } from "../lib/in-address";
import { useLive } from "../live/hooks";
import { KINDS } from "../nodes/detail/events";
import { Fetched, Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Chart, ChartPlaceholder, type ChartEvent, type ChartProps } from "../ui/chart";
import { serverSeconds, useFigures, zoomRange, type Figures, type Range } from "./data";

const RANGES = { hour: 3600, day: 86400, week: 604800 } as const;
type RangeName = keyof typeof RANGES;
const WORDS: Readonly<Record<RangeName, string>> = { hour: "Hour", day: "Day", week: "Week" };
/** Part of a range by which a zoom may differ from it and still be the same: charts end on whole steps. */
const SAME_LENGTH = 0.05;

/** What a chart shows of the figures. */
export type Drawing = Pick<ChartProps, "title" | "lines" | "format" | "top">;

/** A chart that figures usually have: its title and the labels of its lines. */
export interface ExpectedChart {
  title: string;
  labels: readonly string[];
}

interface OverTimeProps {
  scope: Figures["scope"];
  /** The node's id or the model's name; "" for the cluster. */
  name: string;
  /** The charts. Must stay the same function while its result would. */
  draw: (figures: Figures) => readonly Drawing[];
  /** The reason why these charts have no values in the period that ends at this time, in seconds since 1970. */
  explain: (titles: readonly string[], figures: Figures, end: number) => string;
  /** The charts whose places are kept until the figures are there, so that nothing moves then. */
  expected: readonly ExpectedChart[];
}

export function OverTime({ scope, name: subject, draw, explain, expected }: OverTimeProps): ReactNode {
  const [name, setName] = useInAddress(readRange, writeRange);
  const [zoom, setZoom] = useState<Range | null>(null);
  const skew = useLive((state) => state.skew);
  const query = useFigures(scope, subject, zoom ?? { last: RANGES[name] });
  const zoomTo = (from: number, to: number) => {
    const zoomed = zoomRange(from, to, serverSeconds(skew));
    const isChosen = "last" in zoomed && Math.abs(zoomed.last / RANGES[name] - 1) < SAME_LENGTH;
    setZoom(isChosen ? null : zoomed);
  };
  const choose = (choice: RangeName) => {
    setZoom(null);
    setName(choice);
  };
  return (
    <Panel title="Over time" className="over-time" aside={<Choices name={name} isZoomed={zoom !== null} onChoose={choose} />}>
      <Fetched query={query} subject="the figures over time" placeholder={<Places expected={expected} />}>
        {(figures) => <Drawn key={`${scope}/${subject}`} figures={figures} draw={draw} explain={(titles) => explain(titles, figures, zoom !== null && "to" in zoom ? zoom.to : serverSeconds(skew))} onZoom={zoomTo} />}
      </Fetched>
    </Panel>
  );
}

interface ChoicesProps {
  name: RangeName;
  isZoomed: boolean;
  onChoose: (name: RangeName) => void;
}

function Choices({ name, isZoomed, onChoose }: ChoicesProps): ReactNode {
  return (
    <div className="row" role="group" aria-label="Period">
      {isZoomed && (
        <Button small onClick={() => onChoose(name)}>
          Reset zoom
        </Button>
      )}
      {rangeNames.map((choice) => (
        <Button key={choice} small className="chip" aria-pressed={!isZoomed && choice === name} onClick={() => onChoose(choice)}>
          {WORDS[choice]}
        </Button>
      ))}
    </div>
  );
}

function Places({ expected }: Pick<OverTimeProps, "expected">): ReactNode {
  return (
    <div className="charts" aria-hidden="true">
      {expected.map((chart) => (
        <ChartPlaceholder key={chart.title} {...chart} />
      ))}
    </div>
  );
}

const rangeNames = Object.keys(RANGES) as readonly RangeName[];

function readRange(query: URLSearchParams): RangeName {
  return rangeNames.find((name) => name === query.get("range")) ?? "hour";
}

function writeRange(name: RangeName): URLSearchParams {
  return new URLSearchParams(name === "hour" ? {} : { range: name });
}

interface DrawnProps extends Pick<OverTimeProps, "draw"> {
  figures: Figures;
  explain: (titles: readonly string[]) => string;
  onZoom: (from: number, to: number) => void;
}

function Drawn({ figures, draw, explain, onZoom }: DrawnProps): ReactNode {
  const start = Date.parse(figures.from) / 1000;
  const events = useMemo<readonly ChartEvent[]>(() => figures.events.map((event) => ({ at: Date.parse(event.at) / 1000, text: eventText(event, figures.scope) })), [figures]);
  const drawings = useMemo(() => draw(figures), [draw, figures]);
  // A chart that was shown stays, so that a zoom into a time without values does not take the focus away.
  const [shown, setShown] = useState<readonly string[]>([]);
  const added = drawings.filter((drawing) => hasValues(drawing) && !shown.includes(drawing.title));
  if (added.length > 0) setShown([...shown, ...added.map(({ title }) => title)]);
  const visible = drawings.filter(({ title }) => shown.includes(title));
  const unknown = drawings.filter((drawing) => !hasValues(drawing)).map(({ title }) => title);
  const reason = visible.length > 0 && unknown.length === 0 ? "" : explain(unknown);
  return (
    <>
      {visible.length > 0 && (
        <div className="charts">
          {visible.map((drawing) => (
            <Chart key={drawing.title} {...drawing} start={start} step={figures.step} events={events} onZoom={onZoom} />
          ))}
        </div>
      )}
      {reason !== "" && <p className="muted">{reason}</p>}
    </>
  );
}

function hasValues({ lines }: Drawing): boolean {
  return lines.some(({ values }) => isKnown(values));
}

function eventText({ kind, node_name: node }: Figures["events"][number], scope: Figures["scope"]): string {
  const words = KINDS[kind].toLowerCase();
  return scope === "node" ? words : `${node} ${words}`;
}

export type Values = readonly (number | null)[];

/** The values of a figure of the subject itself, or of one of its GPUs; none if it has no such figure. */
export function valuesOf(figures: Figures, name: string, gpu: number | null = null): Values {
  return figures.figures.find((figure) => figure.name === name && figure.gpu === gpu)?.values ?? [];
}

export function isKnown(values: Values): boolean {
  return values.some((value) => value !== null);
}

const DECIMAL = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

export function decimal(value: number): string {
  return DECIMAL.format(value);
}

export function percent(value: number): string {
  return `${Math.round(value)}%`;
}

export function watts(value: number): string {
  return value < 1000 ? `${Math.round(value)} W` : `${decimal(value / 1000)} kW`;
}
