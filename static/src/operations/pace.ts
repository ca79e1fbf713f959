// Rate and time left, from the bytes of the last five seconds. Pure but for `Paces`, which remembers the
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
  secondsLeft: number | null;
}

const WINDOW_MS = 5_000;
const SAMPLED_MS = 3_000;
/** The halves of the window may differ by this factor for the rate to count as steady. */
const STEADY = 2;

export const UNKNOWN: Pace = { rate: null, secondsLeft: null };

/** `remaining` in bytes, null if not known. */
export function pace(samples: readonly Sample[], remaining: number | null, now: number): Pace {
  const recent = samples.filter((sample) => sample.at > now - WINDOW_MS);
  const rate = between(recent[0], recent.at(-1));
  // A file that arrives at once has no rate.
  if (rate === null || remaining === 0) return UNKNOWN;
  const isPredictable = remaining !== null && remaining > 0 && rate > 0 && isSteady(recent);
  return { rate, secondsLeft: isPredictable ? remaining / rate : null };
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
export function combine(paces: readonly Pace[]): Pace {
  const rates = paces.flatMap((item) => (item.rate === null ? [] : [item.rate]));
  const remainingTimes = paces.flatMap((item) => (item.secondsLeft === null ? [] : [item.secondsLeft]));
  if (rates.length === 0) return UNKNOWN;
  return {
    rate: rates.reduce((sum, rate) => sum + rate, 0),
    secondsLeft: remainingTimes.length === paces.length ? Math.max(...remainingTimes) : null,
  };
}

/** The key of one node's part of an operation on several. */
export function targetKey(operation: Pick<Operation, "jobID">, nodeID: string): string {
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
  private readonly jobs = new Map<string, { latest: Operation; samples: Sample[] }>();
  private readonly parts = new Map<string, Sample[]>();

  /** Takes the operations as they are at `now` (ms). */
  observe(operations: ReadonlyMap<string, Operation>, now: number): void {
    for (const jobID of this.jobs.keys()) {
      if (operations.get(jobID)?.status !== "processing") this.jobs.delete(jobID);
    }
    for (const operation of operations.values()) {
      if (operation.status !== "processing" || (operation.currentBytes ?? 0) === 0) continue;
      if (this.jobs.get(operation.jobID)?.latest !== operation) this.sampleTargets(operation, now);
      this.sample(operation, now);
    }
    for (const [key, samples] of this.parts) if ((samples.at(-1)?.at ?? 0) <= now - WINDOW_MS) this.parts.delete(key);
  }

  private sampleTargets(operation: Operation, at: number): void {
    for (const target of moving(operation)) {
      const bytes = target.current_bytes ?? 0;
      const samples = this.parts.get(targetKey(operation, target.node_id));
      if (bytes === 0 || samples?.at(-1)?.bytes === bytes) continue;
      const recent = bytes < (samples?.at(-1)?.bytes ?? 0) ? [] : (samples ?? []).filter((sample) => sample.at > at - WINDOW_MS);
      this.parts.set(targetKey(operation, target.node_id), [...recent, { at, bytes }]);
    }
  }

  /** The pace of each part of an operation on several nodes, by its key. */
  ofTargets(operation: Operation, now: number): [string, Pace][] {
    return moving(operation).map((target) => {
      const key = targetKey(operation, target.node_id);
      const total = target.total_bytes ?? 0;
      return [key, pace(this.parts.get(key) ?? [], total > 0 ? total - (target.current_bytes ?? 0) : null, now)];
    });
  }

  private sample(operation: Operation, at: number): void {
    const job = this.jobs.get(operation.jobID);
    if (job?.latest === operation) return;
    const bytes = operation.currentBytes ?? 0;
    const back = job === undefined || bytes < (job.samples.at(-1)?.bytes ?? 0);
    const recent = back ? [] : job.samples.filter((sample) => sample.at > at - WINDOW_MS);
    this.jobs.set(operation.jobID, { latest: operation, samples: [...recent, { at, bytes }] });
  }

  of(operation: Operation, now: number): Pace {
    const job = this.jobs.get(operation.jobID);
    if (job === undefined) return UNKNOWN;
    if ((operation.nodes ?? []).length > 1) return this.ofSeveral(operation, now);
    const total = operation.totalBytes ?? 0;
    return pace(job.samples, total > 0 ? total - (operation.currentBytes ?? 0) : null, now);
  }

  /** Rates add up; it ends with its slowest part, and that is known only once every part has begun. */
  private ofSeveral(operation: Operation, now: number): Pace {
    const paces = this.ofTargets(operation, now).map(([, item]) => item);
    const waiting = (operation.nodes ?? []).some((node) => node.status === "queued");
    return combine(waiting ? [...paces, UNKNOWN] : paces);
  }

  ofGroup(group: Group, now: number): Pace {
    return combine(group.active.map((operation) => this.of(operation, now)));
  }
}
