// Figures over time, of the cluster or of one model.
import type { ReactNode } from "react";
import { bytes } from "../lib/format";
import type { Figures } from "./data";
import { decimal, isKnown, OverTime, percent, valuesOf, watts, type Drawing } from "./over-time";

interface Figure {
  title: string;
  /** The figure's name in the response. */
  name: string;
  format: (value: number) => string;
  /** A sum for each step, shown by the second. */
  isCount?: boolean;
  /** The machines that report it; absent: requests bring it. */
  of?: "nodes" | "gpus";
  /** The top of the scale, or the name of the figure that has it. */
  top?: number | string;
}

const perSecond = (value: number) => `${decimal(value)}/s`;
const CHARTS: readonly Figure[] = [
  { title: "Requests", name: "requests", format: perSecond, isCount: true },
  { title: "Output tokens", name: "completion_tokens", format: perSecond, isCount: true },
  { title: "Errors", name: "errors", format: perSecond, isCount: true },
  { title: "GPUs busy", name: "busy", format: percent, of: "gpus", top: 100 },
  { title: "VRAM used", name: "vram_used", format: bytes, of: "gpus", top: "vram_total" },
  { title: "RAM used", name: "ram_used", format: bytes, of: "nodes", top: "ram_total" },
  { title: "GPU power", name: "power", format: watts, of: "gpus" },
  // The last one: without tokens it is missing, and the others keep their places.
  { title: "Time to first token", name: "first_token", format: (value) => `${decimal(value)} s` },
];

interface ChartsProps {
  /** Absent for the cluster. */
  model?: string;
  /** False in a cluster without GPUs. */
  hasGpus?: boolean;
}

export function Charts({ model = "", hasGpus = true }: ChartsProps): ReactNode {
  const expected = CHARTS.filter(({ of }) => of === undefined || (model === "" && (of === "nodes" || hasGpus)));
  return <OverTime scope={model === "" ? "cluster" : "model"} name={model} draw={draw} explain={explain} expected={expected.map(({ title }) => ({ title, labels: [""] }))} />;
}

/** The reason why these charts have no values. The time to the first token has none in a period without tokens. */
export function explain(titles: readonly string[], figures: Figures): string {
  if (isKnown(valuesOf(figures, "requests"))) return `${titles.join(", ")}: no request returned a token in this period.`;
  return `${titles.join(", ")}: the server has kept no figures of this period.`;
}

function draw(figures: Figures): Drawing[] {
  return CHARTS.flatMap(({ title, name, format, of, isCount = false, top: highest }) => {
    const values = valuesOf(figures, name);
    if (of !== undefined && !isKnown(values)) return [];
    const top = typeof highest === "string" ? Math.max(0, ...valuesOf(figures, highest).filter((value) => value !== null)) : (highest ?? 0);
    const perStep = isCount ? figures.step : 1;
    return [{ title, format, lines: [{ label: title, values: values.map((value) => (value === null ? null : value / perStep)) }], ...(top > 0 ? { top } : {}) }];
  });
}
