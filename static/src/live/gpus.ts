// The GPUs of a node, one by one, as its worker lists them, and what is used of its memory. Pure.
import { bytes, count } from "../lib/format";
import type { LiveNode } from "./messages";

export type Gpu = LiveNode["gpus"][number];

/** "2 × NVIDIA L4", or the vendor where they are not listed; "" without a GPU. */
export function gpuWords(node: LiveNode): string {
  const names = new Map<string, number>();
  for (const { name } of node.gpus) names.set(name, (names.get(name) ?? 0) + 1);
  if (names.size === 0) return node.gpu_vendor;
  return [...names].map(([name, many]) => (many === 1 ? name : `${many} × ${name}`)).join(", ");
}

/** "37% busy, 62 °C, 210 of 350 W" */
export function gpuActivity({ utilization, temperature, power, power_limit: limit }: Gpu): string {
  const busy = utilization === null ? "utilisation not reported" : `${utilization}% busy`;
  const drawn = power === undefined ? [] : [limit === undefined ? `${power} W` : `${power} of ${limit} W`];
  return [busy, ...(temperature === undefined ? [] : [`${temperature} °C`]), ...drawn].join(", ");
}

/** The versions of the GPUs' drivers, each once; "" if none is known. */
export function driversOf(node: LiveNode): string {
  return [...new Set(node.gpus.flatMap(({ driver }) => driver ?? []))].join("; ");
}

/** "3 GPUs, 72 GiB" */
export function gpuSums(gpus: readonly Gpu[]): string {
  return `${count(gpus.length, "GPU")}, ${bytes(gpus.reduce((sum, gpu) => sum + gpu.total_vram, 0))}`;
}

type MemoryOf<Names extends keyof LiveNode> = Pick<LiveNode, Names>;

/** The usable VRAM: under a budget no more than that is reported free. */
export function vramLimit(node: MemoryOf<"total_vram" | "vram_budget_bytes">): number {
  return node.vram_budget_bytes > 0 ? Math.min(node.vram_budget_bytes, node.total_vram) : node.total_vram;
}

/** Bytes in use of what may be used. */
export function usedVram(node: MemoryOf<"total_vram" | "vram_budget_bytes" | "available_vram">): number {
  return Math.max(0, vramLimit(node) - node.available_vram);
}

export function usedRam(node: MemoryOf<"total_ram" | "available_ram">): number {
  return Math.max(0, node.total_ram - node.available_ram);
}
