// One verb over many nodes: one request, one operation on the server, and what became of each node as the feed says.
// Leaving the page or closing the dialog stops nothing. A verb on one node is a request that ends at once.
import { useCallback, useContext, useEffect, useRef, useState, type RefObject } from "react";
import { ApiError, call, client } from "../../api/client";
import { LiveContext } from "../../live/hooks";
import type { Operation, OperationTarget } from "../../live/messages";
import { isActive, type LiveStore } from "../../live/store";
import { cancel } from "../../operations/calls";

export interface Outcome {
  state: "waiting" | "running" | "done" | "failed" | "stopped";
  error?: Error;
  /** Something to read that is shown this once, such as an agent's token. */
  note?: string;
}

/** The request for one item; a text that it returns becomes the item's note. */
export type Work<Item> = (item: Item) => Promise<unknown>;
/** Requests the verb for all items at once; answers the operation. */
export type WorkOnAll<Item> = (items: readonly Item[]) => Promise<{ jobID: string }>;

export type Outcomes = ReadonlyMap<string, Outcome>;

export interface Bulk<Item> {
  outcomes: Outcomes;
  running: boolean;
  /** Stopped, but the answer is not there yet. */
  stopping: boolean;
  /** The operation that runs the verb on several items; "" for one item. */
  jobID: string;
  /** Answers how it ended. Raises the `ApiError` that names nodes which cannot take it: then nothing has started. */
  start: (items: readonly Item[], work: Work<Item>, workOnAll: WorkOnAll<Item>) => Promise<Outcomes>;
  stop: () => void;
}

/** The number of `outcomes` in `state`. */
export function tally(outcomes: Outcomes, state: Outcome["state"]): number {
  let matchCount = 0;
  for (const outcome of outcomes.values()) if (outcome.state === state) matchCount += 1;
  return matchCount;
}

const STATES: Readonly<Partial<Record<OperationTarget["status"], Outcome["state"]>>> = {
  success: "done",
  error: "failed",
  cancelled: "stopped",
  queued: "waiting",
  superseded: "stopped",
};

/** The outcome of each node of an operation. Every refusal can be inspected and retried, as a conflict. */
export function outcomesOf({ nodes = [] }: Operation): Outcomes {
  return new Map(
    nodes.map((target) => {
      const state = STATES[target.status] ?? "running";
      return [target.node_id, state === "failed" ? { state, error: new ApiError(target.error ?? "", 409) } : { state }];
    }),
  );
}

/** Milliseconds without news from the feed after which the page polls the operation over REST. */
const POLL_MS = 3_000;

/** Follows the operation to its end and reports its state after each change. */
export async function follow(store: LiveStore, jobID: string, report: (operation: Operation) => void, signal: AbortSignal): Promise<void> {
  for (;;) {
    const operation = store.read().operations.get(jobID) ?? (await waitForChange(store, jobID, signal));
    if (signal.aborted) return;
    if (operation !== undefined) {
      report(operation);
      if (!isActive(operation)) return;
    }
    await changed(store, jobID, operation, signal);
  }
}

/** Resolves when the store has another state of the operation, or when it is time to poll the server. */
function changed(store: LiveStore, jobID: string, previous: Operation | undefined, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      stop();
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, POLL_MS);
    const stop = store.subscribe(() => {
      if (store.read().operations.get(jobID) !== previous) done();
    });
    signal.addEventListener("abort", done, { once: true });
    if (signal.aborted || store.read().operations.get(jobID) !== previous) done();
  });
}

/** The operation from the feed if it comes soon, else from the server. */
async function waitForChange(store: LiveStore, jobID: string, signal: AbortSignal): Promise<Operation | undefined> {
  await changed(store, jobID, undefined, signal);
  const operation = store.read().operations.get(jobID);
  if (operation !== undefined || signal.aborted) return operation;
  try {
    return await call(client.GET("/api/operations/{job_id}", { params: { path: { job_id: jobID } } }));
  } catch {
    return undefined;
  }
}

function failureOf(error: unknown): Outcome {
  return { state: "failed", error: error instanceof Error ? error : new Error(String(error)) };
}

/** Ends a run; it may be asked for before the server has named the operation. */
function useStop(control: RefObject<AbortController | null>, jobID: string) {
  const [stopping, setStopping] = useState(false);
  /** The run that was stopped. */
  const stopped = useRef<AbortController | null>(null);
  // What a single request does cannot be taken back; an operation is cancelled, and the feed says how it ended.
  const end = useCallback((job: string) => void cancel({ jobID: job }).catch(() => setStopping(false)), []);
  const stop = useCallback(() => {
    setStopping(true);
    stopped.current = control.current;
    if (jobID !== "") end(jobID);
  }, [control, jobID, end]);
  return { stopping, setStopping, stopped, end, stop };
}

/** The state of a bulk run inside a component. */
export function useBulk<Item extends { id: string }>(): Bulk<Item> {
  const store = useContext(LiveContext);
  const [outcomes, setOutcomes] = useState<Outcomes>(new Map());
  const [running, setRunning] = useState(false);
  const [jobID, setJobID] = useState("");
  const control = useRef<AbortController | null>(null);
  const { stopping, setStopping, stopped, end, stop } = useStop(control, jobID);
  useEffect(() => () => control.current?.abort(), []);
  const start = useCallback(
    async (items: readonly Item[], work: Work<Item>, workOnAll: WorkOnAll<Item>) => {
      const mine = new AbortController();
      control.current = mine;
      let latestOutcomes: Outcomes = new Map();
      const publish = (latest: Outcomes) => {
        latestOutcomes = latest;
        setOutcomes((previous) => new Map([...previous, ...latest]));
      };
      const setEach = (outcome: Outcome) => publish(new Map(items.map((item) => [item.id, outcome])));
      setRunning(true);
      setStopping(false);
      setJobID("");
      setEach({ state: "running" });
      const [only] = items;
      try {
        if (items.length === 1 && only !== undefined) {
          const note = await work(only);
          setEach(typeof note === "string" ? { state: "done", note } : { state: "done" });
        } else {
          const job = (await workOnAll(items)).jobID;
          setJobID(job);
          if (stopped.current === mine) end(job);
          await follow(store, job, (operation) => publish(outcomesOf(operation)), mine.signal);
        }
      } catch (error) {
        if (error instanceof ApiError && error.refusals.length > 0 && items.length > 1) {
          setRunning(false);
          setOutcomes(new Map());
          throw error;
        }
        setEach(failureOf(error));
      }
      setRunning(false);
      return latestOutcomes;
    },
    [store, end, setStopping, stopped],
  );
  return { outcomes, running, stopping: running && stopping, jobID, start, stop };
}
