// The actions on an operation, as calls to the server.
import { ApiError, call, client } from "../api/client";
import type { components } from "../api/schema";
import type { Operation } from "../live/messages";

type Accepted = components["schemas"]["Accepted"];

type Started = components["schemas"]["Started"];

/** Dismisses a failure for all users; with nodes, only the failures on these. */
export function dismiss(operation: Pick<Operation, "jobID">, comment = "", nodes: readonly string[] = []): Promise<unknown> {
  const path = { job_id: operation.jobID };
  const body = nodes.length === 0 ? { comment } : { comment, nodes: [...nodes] };
  return call(client.POST("/api/operations/{job_id}/dismiss", { params: { path }, body }));
}

/** Ends an operation for good; the answer counts the nodes. */
export function cancel(operation: Pick<Operation, "jobID">): Promise<components["schemas"]["Done"]> {
  return call(client.POST("/api/operations/{job_id}/cancel", { params: { path: { job_id: operation.jobID } } }));
}

type Counts = components["schemas"]["OperationCounts"];
export type BulkVerb = "cancel" | "dismiss" | "retry";

/** Does `verb` to all of these operations in one call: what has ended meanwhile is counted, and no failure. */
export function onAll(verb: BulkVerb, operations: readonly Pick<Operation, "jobID">[], comment = ""): Promise<Counts> {
  const body = { verb, ids: operations.map((operation) => operation.jobID), ...(comment === "" ? {} : { comment }) };
  return call(client.POST("/api/operations/bulk", { body }));
}

/** Ends operations for good; answers how many ended by this and how many had finished before. Raises `ApiError` if one was refused. */
export async function cancelAll(operations: readonly Pick<Operation, "jobID">[]): Promise<string> {
  const [only] = operations;
  if (only !== undefined && operations.length === 1) return (await cancel(only)).message;
  const { done, ended, refused, reasons } = await onAll("cancel", operations);
  if (refused > 0) throw new ApiError(`${done} cancelled, ${ended} had already finished, ${refused} refused: ${reasons.join("; ")}`, 409);
  return `${done} cancelled, ${ended} had already finished`;
}

/** Does `verb` to one operation or to several, in one call; raises `ApiError` if one was refused. */
export async function act(verb: Exclude<BulkVerb, "cancel">, operations: readonly Pick<Operation, "jobID">[], comment = ""): Promise<void> {
  const [first] = operations;
  if (first !== undefined && operations.length === 1) {
    await (verb === "retry" ? retry(first) : dismiss(first, comment));
    return;
  }
  const { done, refused, reasons } = await onAll(verb, operations, comment);
  if (refused > 0) throw new ApiError(`${done} done, ${refused} refused: ${reasons.join("; ")}`, 409);
}

/** Ends an operation for good on one of its nodes; the others go on. */
export function cancelOn(operation: Pick<Operation, "jobID">, nodeID: string): Promise<unknown> {
  const path = { job_id: operation.jobID, node_id: nodeID };
  return call(client.POST("/api/operations/{job_id}/nodes/{node_id}/cancel", { params: { path } }));
}

/** Asks again for the same, on these nodes or wherever it did not succeed; what still waits is tried at once. */
export function retry(operation: Pick<Operation, "jobID">, nodes: readonly string[] = []): Promise<Started> {
  const path = { job_id: operation.jobID };
  const body = nodes.length === 0 ? {} : { nodes: [...nodes] };
  return call(client.POST("/api/operations/{job_id}/retry", { params: { path }, body }));
}

export type WaveOptions = components["schemas"]["WaveOptions"];

/** Asks nodes for a backend, by its name or from an address: one operation, which joins what is under way there. */
export function install(nodeIDs: readonly string[], from: string | { uri: string; name: string; alias: string }, waves: WaveOptions | null = null): Promise<Accepted> {
  // An installation from an address is named by that address.
  const backend = typeof from !== "string" ? from : from.includes("://") ? { uri: from } : { backend: from };
  const [only = ""] = nodeIDs;
  if (nodeIDs.length === 1) return call(client.POST("/api/nodes/{node_id}/backends/install", { params: { path: { node_id: only } }, body: backend }));
  return call(client.POST("/api/nodes/backends/install", { body: { ids: [...nodeIDs], ...backend, ...(waves === null ? {} : { waves }) } }));
}

/** Stops the backend's engines on one node and installs it again; joins an upgrade under way there. */
export function upgradeOn(nodeID: string, backend: string): Promise<Accepted> {
  const path = { node_id: nodeID };
  return call(client.POST("/api/nodes/{node_id}/backends/upgrade", { params: { path }, body: { backend } }));
}

/** Stops the backend's engines on one node and removes its files; joins a deletion under way there. */
export function deleteOn(nodeID: string, backend: string): Promise<Accepted> {
  const path = { node_id: nodeID };
  return call(client.POST("/api/nodes/{node_id}/backends/delete", { params: { path }, body: { backend } }));
}

/** Lets an upgrade in waves go on after a wave that failed, or ends what has not begun; these models may lose their last replica. */
export function chooseWaves(operation: Pick<Operation, "jobID">, choice: "continue" | "stop", lastReplicas: readonly string[] = []): Promise<unknown> {
  const body = { choice, ...(lastReplicas.length === 0 ? {} : { last_replicas: [...lastReplicas] }) };
  return call(client.POST("/api/operations/{job_id}/waves", { params: { path: { job_id: operation.jobID } }, body }));
}

/** Kinds beside those of backends and nodes that are carried out again as they were requested. */
const RETRIED: ReadonlySet<string> = new Set(["model_import", "model_files_remove", "definition_delete"]);

/** True if a failed or cancelled operation can be retried; a load cannot, because it comes again with its request. */
export function canRetry({ kind, status, nodes = [] }: Pick<Operation, "kind" | "status" | "nodes">): boolean {
  const leftOut = status === "completed" && nodes.some((target) => target.status === "cancelled");
  const isRetried = kind.startsWith("backend_") || kind.startsWith("node_") || RETRIED.has(kind);
  return isRetried && (status === "failed" || status === "cancelled" || leftOut);
}
