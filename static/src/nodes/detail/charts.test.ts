import { expect, it, vi } from "vitest";
import type { Figures } from "../../overview/data";
import { absence, drawings, type Tops } from "./charts";

// Needs a canvas.
vi.mock("../../ui/chart", () => ({ Chart: () => null }));

type Figure = Figures["figures"][number];
type Row = readonly [name: Figure["name"], gpu: number | null, values: (number | null)[]];
const TOPS: Tops = { gpuVram: 24, gpuPower: 0, vram: 48, ram: 64, disk: 0 };

function figures(each: readonly Row[]): Figures {
  return { scope: "node", name: "n1", from: "2026-08-22T10:00:00Z", step: 10, figures: each.map(([name, gpu, values]) => ({ name, gpu, unit: "bytes", values })), events: [] };
}

const shown = (...each: readonly Row[]) => drawings(figures(each), TOPS).map(({ title, lines, top }) => [title, lines.map(({ label, values }) => `${label} ${String(values)}`), top]);

it("has a line for each GPU, and nothing that no driver reports (UI-4.16)", () => {
  expect(shown(["vram_used", null, [3, 3]], ["vram_used", 0, [1, null]], ["vram_used", 1, [2, 3]], ["busy", 0, [5, 6]], ["temperature", 0, [null, null]], ["power", 0, [70, 71]], ["ram_used", null, [9, 8]])).toEqual([
    ["GPU busy", ["GPU 0 5,6"], 100],
    ["VRAM used", ["GPU 0 1,", "GPU 1 2,3"], 24],
    ["GPU power", ["GPU 0 70,71"], undefined],
    ["RAM used", [" 9,8"], 64],
  ]);
});

it("draws the sum of the memory where GPUs are not reported one by one", () => {
  expect(shown(["vram_used", null, [3, null]])).toEqual([["VRAM used", [" 3,"], 48]]);
});

it("draws the highest, the mean and the lowest of many GPUs", () => {
  const many = Array.from({ length: 9 }, (_, gpu): Row => ["busy", gpu, [gpu === 8 ? 7 : gpu, null]]);
  expect(shown(...many)).toEqual([["GPU busy", ["Highest 7,", "Mean 3.888888888888889,", "Lowest 0,"], 100]]);
});

it("says why a node has no figures", () => {
  const node = { created_at: "2026-08-22T10:00:00Z", last_heartbeat: "2026-08-22T12:00:00Z" };
  const reason = (from: string, end: string, of = node as { created_at: string; last_heartbeat: string | null }) => absence(of, Date.parse(from), Date.parse(end));
  expect(reason("2026-08-22T11:00:00Z", "2026-08-22T12:00:00Z", { ...node, last_heartbeat: null })).toBe("The node has not sent figures yet: they come with its heartbeats.");
  expect(reason("2026-08-22T08:00:00Z", "2026-08-22T09:00:00Z")).toContain("not there in this period: it registered on ");
  expect(reason("2026-08-22T13:00:00Z", "2026-08-22T14:00:00Z")).toContain("silent in this period: its last heartbeat came on ");
  expect(reason("2026-08-22T11:00:00Z", "2026-08-22T12:00:00Z")).toBe("The server has kept no figures of the node in this period.");
});
