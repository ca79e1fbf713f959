// How fast, and how long still: from the bytes of the last five seconds. Pure but for `Paces`, which remembers the
// samples. Rather nothing than a wrong figure.
import type { Operation, OperationTarget } from "../live/messages";
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

/** The key of one node's part of an operation on several. */
export function partKey(operation: Pick<Operation, "jobID">, nodeID: string): string {
  return `${operation.jobID} ${nodeID}`;
}

/** The parts of an operation on several nodes that move; of any other, none. */
function moving(operation: Operation): OperationTarget[] {
  const { nodes = [] } = operation;
  if (nodes.length < 2) return [];
  return nodes.filter((node) => node.status === "downloading" || node.status === "running_on_worker");
}

/** The samples of what is under way. */
export class Paces {
  private readonly jobs = new Map<string, { seen: Operation; samples: Sample[] }>();
  private readonly parts = new Map<string, Sample[]>();

  /** Takes the operations as they are at `now` (ms). */
  observe(operations: ReadonlyMap<string, Operation>, now: number): void {
    for (const jobID of this.jobs.keys()) {
      if (operations.get(jobID)?.status !== "processing") this.jobs.delete(jobID);
    }
    for (const operation of operations.values()) {
      if (operation.status !== "processing" || (operation.currentBytes ?? 0) === 0) continue;
      if (this.jobs.get(operation.jobID)?.seen !== operation) this.sampleParts(operation, now);
      this.sample(operation, now);
    }
    for (const [key, samples] of this.parts) if ((samples.at(-1)?.at ?? 0) <= now - WINDOW_MS) this.parts.delete(key);
  }

  private sampleParts(operation: Operation, at: number): void {
    for (const part of moving(operation)) {
      const bytes = part.current_bytes ?? 0;
      const known = this.parts.get(partKey(operation, part.node_id));
      if (bytes === 0 || known?.at(-1)?.bytes === bytes) continue;
      const kept = bytes < (known?.at(-1)?.bytes ?? 0) ? [] : (known ?? []).filter((sample) => sample.at > at - WINDOW_MS);
      this.parts.set(partKey(operation, part.node_id), [...kept, { at, bytes }]);
    }
  }

  /** The pace of each part of an operation on several nodes, by its key. */
  ofParts(operation: Operation, now: number): [string, Pace][] {
    return moving(operation).map((part) => {
      const key = partKey(operation, part.node_id);
      const total = part.total_bytes ?? 0;
      return [key, pace(this.parts.get(key) ?? [], total > 0 ? total - (part.current_bytes ?? 0) : null, now)];
    });
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
    if ((operation.nodes ?? []).length > 1) return this.ofSeveral(operation, now);
    const total = operation.totalBytes ?? 0;
    return pace(known.samples, total > 0 ? total - (operation.currentBytes ?? 0) : null, now);
  }

  /** Rates add up; it ends with its slowest part, and that is known only once every part has begun. */
  private ofSeveral(operation: Operation, now: number): Pace {
    const paces = this.ofParts(operation, now).map(([, one]) => one);
    const waiting = (operation.nodes ?? []).some((node) => node.status === "queued");
    return together(waiting ? [...paces, UNKNOWN] : paces);
  }

  ofGroup(group: Group, now: number): Pace {
    return together(group.active.map((operation) => this.of(operation, now)));
  }
}
