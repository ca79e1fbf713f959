// The requests of the view of installed backends: one operation for each backend, over its nodes.
import { ApiError, call, client } from "../api/client";
import type { components } from "../api/schema";

type Started = components["schemas"]["Started"];

export type Verb = "upgrade" | "reinstall" | "delete";

/** A canary, then one node at a time. */
const WAVES = { canary: true, max_unavailable: 1 } as const;

/** One backend and the ids of its nodes. */
export interface BackendRequest {
  backend: string;
  nodes: readonly string[];
}

/** Does `verb` to a backend on these nodes; in waves, these models may lose their last replica. */
export function change(verb: Verb, { backend, nodes }: BackendRequest, inWaves: boolean, confirmed: readonly string[] = []): Promise<Started> {
  const params = { path: { name: backend } };
  const body = { nodes: [...nodes] };
  if (verb === "delete") return call(client.POST("/api/backends/delete/{name}", { params, body }));
  // The question has named the requests that end.
  if (verb === "reinstall") return call(client.POST("/api/backends/install/{name}", { params, body: { ...body, force: true } }));
  const waves = inWaves ? { waves: WAVES, ...(confirmed.length === 0 ? {} : { last_replicas: [...confirmed] }) } : {};
  return call(client.POST("/api/backends/upgrade/{name}", { params, body: { ...body, ...waves } }));
}

/** The outcome of several requests, by backend. */
export interface Outcome {
  started: string[];
  /** Models that have to be confirmed first. */
  lastReplicas: Map<string, readonly string[]>;
  failed: Map<string, Error>;
}

/** Asks for one wish after the other, each whatever becomes of the others. */
export async function changeAll(requests: readonly BackendRequest[], send: (request: BackendRequest) => Promise<unknown>): Promise<Outcome> {
  const outcome: Outcome = { started: [], lastReplicas: new Map(), failed: new Map() };
  for (const request of requests) {
    try {
      await send(request);
      outcome.started.push(request.backend);
    } catch (error) {
      if (error instanceof ApiError && error.lastReplicas.length > 0) outcome.lastReplicas.set(request.backend, error.lastReplicas);
      else outcome.failed.set(request.backend, error instanceof Error ? error : new Error(String(error)));
    }
  }
  return outcome;
}
