// The request of the view of installed backends: one for all backends; the server makes one operation for each.
import { ApiError, call, client } from "../api/client";

export type Verb = "upgrade" | "reinstall" | "delete";

/** A canary, then one node at a time. */
const WAVES = { canary: true, max_unavailable: 1 } as const;

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
  failed: Map<string, Error>;
}

/** Does `verb` to each backend on its nodes; the requests that end were named in the question. */
export async function changeAll(verb: Verb, requests: readonly BackendRequest[], inWaves: boolean): Promise<Outcome> {
  const waves = inWaves && verb === "upgrade";
  const backends = requests.map(({ backend, nodes, lastReplicas }) => ({ backend, nodes: [...nodes], ...(waves ? { last_replicas: [...lastReplicas] } : {}) }));
  const { results } = await call(client.POST("/api/backends/changes", { body: { verb, backends, ...(waves ? { waves: WAVES } : {}) } }));
  const outcome: Outcome = { started: [], lastReplicas: new Map(), failed: new Map() };
  for (const { backend, ...result } of results) {
    const lastReplicas = result.last_replicas ?? [];
    if (result.error === undefined) outcome.started.push(backend);
    else if (lastReplicas.length > 0) outcome.lastReplicas.set(backend, lastReplicas);
    else outcome.failed.set(backend, new ApiError(result.error, 409, result.field));
  }
  return outcome;
}
