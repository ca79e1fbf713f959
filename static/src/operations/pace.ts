// How fast, and how long still: from the bytes of the last five seconds. Pure but for `Paces`, which remembers the
// samples. Rather nothing than a wrong figure.
import type { Operation } from "../live/messages";
import type { Group } from "./model";

export interface Sample {
  /** Milliseconds. */
  at: number;
  bytes: number;
}

export interface Pace {
  /** Bytes a second; null while not known. */
  rate: number | null;
  /** Seconds; null unless the rate is steady and the end is known. */
  left: number | null;
}

const WINDOW_MS = 5_000;
const SAMPLED_MS = 3_000;
/** The halves of the window may differ by this factor for the rate to count as steady. */
const STEADY = 2;

export const UNKNOWN: Pace = { rate: null, left: null };

/** `remaining` in bytes, null if not known. */
export function pace(samples: readonly Sample[], remaining: number | null, now: number): Pace {
  const recent = samples.filter((sample) => sample.at > now - WINDOW_MS);
  const rate = between(recent[0], recent.at(-1));
  // What has come as a whole comes at no rate, however fast it came.
  if (rate === null || remaining === 0) return UNKNOWN;
  const known = remaining !== null && remaining > 0 && rate > 0 && isSteady(recent);
  return { rate, left: known ? remaining / rate : null };
}

function between(first: Sample | undefined, last: Sample | undefined): number | null {
  if (first === undefined || last === undefined || last.at <= first.at) return null;
  return (1000 * (last.bytes - first.bytes)) / (last.at - first.at);
}

function isSteady(samples: readonly Sample[]): boolean {
  const [first, last] = [samples[0], samples.at(-1)];
  if (first === undefined || last === undefined || last.at - first.at < SAMPLED_MS) return false;
  const middle = samples.find((sample) => sample.at >= (first.at + last.at) / 2);
  const [early, late] = [between(first, middle), between(middle, last)];
  if (early === null || late === null) return false;
  return Math.max(early, late) <= STEADY * Math.min(early, late);
}

/** The pace of a group: rates add up, and it ends with its slowest; no time left if anything of it has none. */
export function together(paces: readonly Pace[]): Pace {
  const rates = paces.flatMap((one) => (one.rate === null ? [] : [one.rate]));
  const lefts = paces.flatMap((one) => (one.left === null ? [] : [one.left]));
  if (rates.length === 0) return UNKNOWN;
  return {
    rate: rates.reduce((sum, rate) => sum + rate, 0),
    left: lefts.length === paces.length ? Math.max(...lefts) : null,
  };
}

/** The samples of what is under way. */
export class Paces {
  private readonly jobs = new Map<string, { seen: Operation; samples: Sample[] }>();

  /** Takes the operations as they are at `now` (ms). */
  observe(operations: ReadonlyMap<string, Operation>, now: number): void {
    for (const jobID of this.jobs.keys()) {
      if (operations.get(jobID)?.status !== "processing") this.jobs.delete(jobID);
    }
    for (const operation of operations.values()) {
      if (operation.status === "processing" && (operation.currentBytes ?? 0) > 0) this.sample(operation, now);
    }
  }

  private sample(operation: Operation, at: number): void {
    const known = this.jobs.get(operation.jobID);
    if (known?.seen === operation) return;
    const bytes = operation.currentBytes ?? 0;
    const back = known === undefined || bytes < (known.samples.at(-1)?.bytes ?? 0);
    const kept = back ? [] : known.samples.filter((sample) => sample.at > at - WINDOW_MS);
    this.jobs.set(operation.jobID, { seen: operation, samples: [...kept, { at, bytes }] });
  }

  of(operation: Operation, now: number): Pace {
    const known = this.jobs.get(operation.jobID);
    if (known === undefined) return UNKNOWN;
    const total = operation.totalBytes ?? 0;
    return pace(known.samples, total > 0 ? total - (operation.currentBytes ?? 0) : null, now);
  }

  ofGroup(group: Group, now: number): Pace {
    return together(group.active.map((operation) => this.of(operation, now)));
  }
}
