// Memory over time: the last hour by the minute as the server has kept it, then what this page has seen itself; a
// bounded ring of samples, with gaps where nothing was known.

/** Number of samples that are kept. */
export const MAX_SAMPLES = 600;
/** Milliseconds between two samples: fifty minutes in all. */
export const EVERY_MS = 5000;

export interface Sample {
  /** Seconds since 1970, by the server's clock. */
  at: number;
  /** Bytes; null while the feed was lost or the node was away. */
  vram: number | null;
  ram: number | null;
}

/** The ring with one more sample; the oldest falls out. */
export function withSample(ring: readonly Sample[], sample: Sample): readonly Sample[] {
  return [...(ring.length < MAX_SAMPLES ? ring : ring.slice(ring.length - MAX_SAMPLES + 1)), sample];
}

/** A minute that the server has kept. */
interface StoredSample {
  at: string;
  vram_used: number | null;
  ram_used: number | null;
}

/** Two minutes without a sample are a gap. */
const GAP_S = 150;

/** Samples that the server stored before the page opened, and live ones since. */
export function withKept(stored: readonly StoredSample[], live: readonly Sample[]): readonly Sample[] {
  const previous: Sample[] = [];
  const end = live[0]?.at ?? Infinity;
  for (const { at: iso, vram_used: vram, ram_used: ram } of stored) {
    const at = Date.parse(iso) / 1000;
    const last = previous.at(-1);
    if (at >= end) break;
    if (last !== undefined && at - last.at > GAP_S) previous.push({ at: last.at + 1, vram: null, ram: null });
    previous.push({ at, vram, ram });
  }
  return [...previous, ...live];
}

/** The lowest and highest known figure, null without any. */
export function range(values: readonly (number | null)[]): { low: number; high: number } | null {
  const numbers = values.filter((value) => value !== null);
  if (numbers.length === 0) return null;
  return { low: Math.min(...numbers), high: Math.max(...numbers) };
}

interface Figures {
  total_vram: number;
  available_vram: number;
  vram_budget_bytes: number;
  total_ram: number;
  available_ram: number;
}

/** The usable VRAM: under a budget no more than that is reported free. */
export function vramLimit(node: Figures): number {
  return node.vram_budget_bytes > 0 ? Math.min(node.vram_budget_bytes, node.total_vram) : node.total_vram;
}

/** Bytes in use of what may be used. */
export function usedVram(node: Figures): number {
  return Math.max(0, vramLimit(node) - node.available_vram);
}

export function usedRam(node: Figures): number {
  return Math.max(0, node.total_ram - node.available_ram);
}

/** A sample of the node as the feed has it; empty while that is old or the node does not report. */
export function sampled(node: (Figures & { status: string }) | undefined, live: boolean, nowMs: number): Sample {
  const at = nowMs / 1000;
  if (node === undefined || !live || node.status === "offline") return { at, vram: null, ram: null };
  return {
    at,
    vram: node.total_vram > 0 ? usedVram(node) : null,
    ram: node.total_ram > 0 ? usedRam(node) : null,
  };
}
