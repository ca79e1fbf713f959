// The request of the view of installed backends: one for all backends; the server makes one operation for each.
import { ApiError, call, client, nodeRefusals, type NodeRefusal } from "../api/client";
import type { WaveOptions } from "../operations/calls";

export type Verb = "upgrade" | "reinstall" | "delete";

/** One backend, the ids of its nodes, and the models that may lose their last replica. */
export interface BackendRequest {
  backend: string;
  nodes: readonly string[];
  lastReplicas: readonly string[];
}

/** The outcome by backend. */
export interface Outcome {
  started: string[];
  /** Models that have to be confirmed first. */
  lastReplicas: Map<string, readonly string[]>;
  /** Nodes that cannot take it; nothing of this backend has started. */
  refused: Map<string, readonly NodeRefusal[]>;
  failed: Map<string, Error>;
}

/** Does `verb` to each backend on its nodes; the requests that end were named in the question. */
export async function changeAll(verb: Verb, requests: readonly BackendRequest[], waves: WaveOptions | null): Promise<Outcome> {
  const backends = requests.map(({ backend, nodes, lastReplicas }) => ({ backend, nodes: [...nodes], ...(waves === null ? {} : { last_replicas: [...lastReplicas] }) }));
  const { results } = await call(client.POST("/api/backends/changes", { body: { verb, backends, ...(waves === null ? {} : { waves }) } }));
  const outcome: Outcome = { started: [], lastReplicas: new Map(), refused: new Map(), failed: new Map() };
  for (const { backend, ...result } of results) {
    const lastReplicas = result.last_replicas ?? [];
    if (result.jobID !== undefined) outcome.started.push(backend);
    // Held back, because another one is refused.
    else if (result.error === undefined) continue;
    else if (lastReplicas.length > 0) outcome.lastReplicas.set(backend, lastReplicas);
    else if ((result.refusals ?? []).length > 0) outcome.refused.set(backend, nodeRefusals(result.refusals));
    else outcome.failed.set(backend, new ApiError(result.error, 409, result.field));
  }
  return outcome;
}
