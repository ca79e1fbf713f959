// Loads of a model as the feed tells them; without the feed, as the server answers.
import { ApiError, call, client } from "../api/client";
import type { Operation } from "../live/messages";
import { isActive, type LiveState, type LiveStore } from "../live/store";

const POLL_MS = 1_000;
const ASK_MS = 2_000;

/** The number of replicas that serve the model. */
export function loadedOf({ nodes }: Pick<LiveState, "nodes">, model: string): number {
  let replicaCount = 0;
  for (const node of nodes.values()) for (const replica of node.models) if (replica.model_name === model && replica.state === "loaded") replicaCount += 1;
  return replicaCount;
}

/** The load of it that is under way, the oldest. */
export function loadOf({ operations }: Pick<LiveState, "operations">, model: string): Operation | undefined {
  let loadOperation: Operation | undefined;
  for (const operation of operations.values()) {
    if (operation.kind === "model_load" && operation.fullName === model && isActive(operation) && !(loadOperation !== undefined && loadOperation.createdAt <= operation.createdAt)) loadOperation = operation;
  }
  return loadOperation;
}

/** Waits until the model is loaded or its load has ended; the same request then returns the reason. */
export async function untilLoaded(store: LiveStore, model: string, signal: AbortSignal): Promise<void> {
  for (;;) {
    const live = store.read().connection === "live";
    await delay(live ? POLL_MS : ASK_MS, signal);
    const state = store.read();
    const goesOn = state.connection === "live" ? loadedOf(state, model) === 0 && loadOf(state, model) !== undefined : await requestUnload(model, signal);
    if (!goesOn) return;
  }
}

/** True if the server reports that the load goes on. */
async function requestUnload(model: string, signal: AbortSignal): Promise<boolean> {
  try {
    const params = { path: { model } };
    return (await call(client.GET("/api/models/{model}/load-status", { params, signal }))).state !== "failed";
  } catch (error) {
    if (error instanceof ApiError && error.status === 0) return true;
    if (error instanceof ApiError) return error.status >= 500;
    throw error;
  }
}

/** Lets time pass; raises AbortError when it is stopped. */
export function delay(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const over = () => reject(new DOMException("stopped", "AbortError"));
    if (signal.aborted) {
      over();
      return;
    }
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", over);
      resolve();
    }, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      over();
    }, { once: true });
  });
}
