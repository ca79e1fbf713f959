// One verb over many nodes: at most six requests at once, and what became of each node. A failure stops nothing;
// what failed can be asked again. Stopping leaves alone what has not been asked yet.
import { useCallback, useEffect, useRef, useState } from "react";

export interface Outcome {
  state: "waiting" | "running" | "done" | "failed" | "stopped";
  error?: Error;
  /** Something to read that is shown this once, such as an agent's token. */
  note?: string;
}

/** What is done with one item; an answer that is a text becomes its note. */
export type Work<Item> = (item: Item) => Promise<unknown>;

/** Requests under way at one moment; browsers keep about six connections to a host. */
export const MOST_AT_ONCE = 6;

/** Runs `work` on every item and tells each change; answers when all have ended. */
export async function runAll<Item extends { id: string }>(
  items: readonly Item[],
  work: Work<Item>,
  tell: (id: string, outcome: Outcome) => void,
  signal: AbortSignal,
): Promise<void> {
  const queue = items.values();
  const lane = async () => {
    // All lanes draw from one iterator, so each item is taken once.
    for (const item of queue) tell(item.id, signal.aborted ? { state: "stopped" } : await one(item, work, tell));
  };
  await Promise.all(Array.from({ length: Math.min(MOST_AT_ONCE, items.length) }, lane));
}

async function one<Item extends { id: string }>(
  item: Item,
  work: Work<Item>,
  tell: (id: string, outcome: Outcome) => void,
): Promise<Outcome> {
  tell(item.id, { state: "running" });
  try {
    const note = await work(item);
    return typeof note === "string" ? { state: "done", note } : { state: "done" };
  } catch (error) {
    return { state: "failed", error: error instanceof Error ? error : new Error(String(error)) };
  }
}

export type Outcomes = ReadonlyMap<string, Outcome>;

export interface Bulk<Item> {
  outcomes: Outcomes;
  running: boolean;
  /** Stopped, but what was asked before is not answered yet. */
  stopping: boolean;
  /** Answers how it ended. */
  start: (items: readonly Item[], work: Work<Item>) => Promise<Outcomes>;
  stop: () => void;
}

/** How many of `outcomes` are in `state`. */
export function tally(outcomes: Outcomes, state: Outcome["state"]): number {
  let found = 0;
  for (const outcome of outcomes.values()) if (outcome.state === state) found += 1;
  return found;
}

const WAITING: Outcome = { state: "waiting" };

/** The state of a bulk run inside a component. */
export function useBulk<Item extends { id: string }>(): Bulk<Item> {
  const [outcomes, setOutcomes] = useState<Outcomes>(new Map());
  const [running, setRunning] = useState(false);
  const [stopping, setStopping] = useState(false);
  const control = useRef<AbortController | null>(null);
  useEffect(() => () => control.current?.abort(), []);
  const start = useCallback(async (items: readonly Item[], work: Work<Item>) => {
    const mine = new AbortController();
    control.current = mine;
    const known = new Map<string, Outcome>();
    const tell = (id: string, outcome: Outcome) => {
      known.set(id, outcome);
      setOutcomes((before) => new Map(before).set(id, outcome));
    };
    setRunning(true);
    setStopping(false);
    setOutcomes((before) => new Map([...before, ...items.map((item) => [item.id, WAITING] as const)]));
    await runAll(items, work, tell, mine.signal);
    setRunning(false);
    return known;
  }, []);
  const stop = useCallback(() => {
    setStopping(true);
    control.current?.abort();
  }, []);
  return { outcomes, running, stopping: running && stopping, start, stop };
}
