// The node's figures over time: a line for each GPU, and the memory and the disk of the machine.
import { useMemo, type ReactNode } from "react";
import { bytes, exact } from "../../lib/format";
import { vramLimit } from "../../live/gpus";
import type { LiveNode } from "../../live/messages";
import type { Figures } from "../../overview/data";
import { isKnown, OverTime, percent, valuesOf, watts, type Drawing, type ExpectedChart, type Values } from "../../overview/over-time";
import type { ChartLine } from "../../ui/chart";

/** The tops of the scales; 0: as high as the largest value. */
export interface Tops {
  gpuVram: number;
  gpuPower: number;
  vram: number;
  ram: number;
  disk: number;
}

/** More lines cannot be told apart: the highest, the mean and the lowest of all GPUs are drawn instead. */
const MOST_LINES = 8;
const SUMMARY = ["Highest", "Mean", "Lowest"] as const;

export function Charts({ node }: { node: LiveNode }): ReactNode {
  const { total_ram: ram, total_disk: disk } = node;
  const gpus = node.gpus;
  const vram = vramLimit(node);
  const gpuVram = Math.max(0, ...gpus.map((gpu) => gpu.total_vram));
  const gpuPower = Math.max(0, ...gpus.map((gpu) => gpu.power_limit ?? 0));
  const draw = useMemo(() => (figures: Figures) => drawings(figures, { gpuVram, gpuPower, vram, ram, disk }), [gpuVram, gpuPower, vram, ram, disk]);
  const gpuLabels = gpus.length > MOST_LINES ? SUMMARY : gpus.map(({ index }) => labelOf(index));
  // A node that has sent nothing has no charts whose places are to be kept.
  const expected = node.last_heartbeat === null ? [] : expectedCharts(gpuLabels);
  return <OverTime scope="node" name={node.id} draw={draw} explain={(_, { from }, end) => absence(node, Date.parse(from), 1000 * end)} expected={expected} />;
}

/** The reason why the node has no figures between these times, in ms. */
export function absence({ created_at: created, last_heartbeat: heartbeat }: Pick<LiveNode, "created_at" | "last_heartbeat">, from: number, end: number): string {
  if (heartbeat === null) return "The node has not sent figures yet: they come with its heartbeats.";
  if (Date.parse(created) > end) return `The node was not there in this period: it registered on ${exact(created)}.`;
  if (Date.parse(heartbeat) < from) return `The node was silent in this period: its last heartbeat came on ${exact(heartbeat)}.`;
  return "The server has kept no figures of the node in this period.";
}

/** The charts of a node with these lines of GPUs. */
function expectedCharts(gpuLabels: readonly string[]): ExpectedChart[] {
  const gpuTitles = gpuLabels.length > 0 ? ["GPU busy", "VRAM used", "GPU temperature", "GPU power"] : [];
  const ofGpus = gpuTitles.map((title) => ({ title, labels: gpuLabels }));
  return [...ofGpus, ...["RAM used", "Models disk used"].map((title) => ({ title, labels: [""] }))];
}

function labelOf(gpu: number | null): string {
  return `GPU ${gpu}`;
}

/** The charts of what is known in this time. */
export function drawings(figures: Figures, tops: Tops): Drawing[] {
  const vram = gpuLines(figures, "vram_used");
  const all: readonly (readonly [title: string, lines: readonly ChartLine[], format: Drawing["format"], top: number])[] = [
    ["GPU busy", gpuLines(figures, "busy"), percent, 100],
    ["VRAM used", vram.length > 0 ? vram : ownLine(figures, "vram_used"), bytes, vram.length > 0 ? tops.gpuVram : tops.vram],
    ["GPU temperature", gpuLines(figures, "temperature"), (value) => `${Math.round(value)} °C`, 0],
    ["GPU power", gpuLines(figures, "power"), watts, tops.gpuPower],
    ["RAM used", ownLine(figures, "ram_used"), bytes, tops.ram],
    ["Models disk used", ownLine(figures, "disk_used"), bytes, tops.disk],
  ];
  return all.flatMap(([title, lines, format, top]) => (lines.length === 0 ? [] : [{ title, lines, format, ...(top > 0 ? { top } : {}) }]));
}

function ownLine(figures: Figures, name: string): ChartLine[] {
  const values = valuesOf(figures, name);
  return isKnown(values) ? [{ label: "", values }] : [];
}

/** A line for each GPU with such a figure. */
function gpuLines(figures: Figures, name: string): ChartLine[] {
  const lines = figures.figures.filter((figure) => figure.name === name && figure.gpu !== null && isKnown(figure.values));
  if (lines.length > MOST_LINES) return summary(lines.map(({ values }) => values));
  return lines.map(({ gpu, values }) => ({ label: labelOf(gpu), values }));
}

function summary(lines: readonly Values[]): ChartLine[] {
  const bySteps = (lines[0] ?? []).map((_, step) => lines.flatMap((values) => values[step] ?? []));
  const each = (label: string, of: (known: readonly number[]) => number): ChartLine => ({ label, values: bySteps.map((known) => (known.length === 0 ? null : of(known))) });
  const [highest, mean, lowest] = SUMMARY;
  return [each(highest, (known) => Math.max(...known)), each(mean, (known) => known.reduce((sum, value) => sum + value, 0) / known.length), each(lowest, (known) => Math.min(...known))];
}
