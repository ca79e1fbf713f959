// The actions on a node: one typed call for each verb of the API, and the reason why one is not possible now. The
// result shows by the feed's change; nothing here touches what the page knows.
import { call, client } from "../../api/client";
import type { components } from "../../api/schema";
import type { LiveNode } from "../../live/messages";

export type Verb = "approve" | "reject" | "drain" | "resume" | "stop" | "label" | "install" | "rotate" | "revoke" | "deregister";

/** The longest reason that a verb takes, in characters. */
export const LONGEST_REASON = 255;
/** The longest drain deadline, in minutes. */
export const LONGEST_DEADLINE_MINUTES = 30 * 24 * 60;

const of = (id: string) => ({ path: { node_id: id } });

/** An empty reason is not sent. */
function because(reason: string): { reason?: string } {
  return reason.trim() === "" ? {} : { reason: reason.trim() };
}

/** Lets a pending node in. 409 if its fingerprint is no longer the one that was looked at. */
export function approve(id: string, fingerprint: string, reason = "") {
  const body = { ...because(reason), ...(fingerprint === "" ? {} : { fingerprint }) };
  return call(client.POST("/api/nodes/{node_id}/approve", { params: of(id), body }));
}

/** Says no to a pending node; the reason must not be empty. */
export function reject(id: string, reason: string) {
  return call(client.POST("/api/nodes/{node_id}/reject", { params: of(id), body: { reason: reason.trim() } }));
}

/** Sends nothing new there. `minutes` is what running requests may take; null leaves it to the server. */
export function drain(id: string, reason: string, minutes: number | null) {
  const body = { ...because(reason), ...(minutes === null ? {} : { deadline_seconds: Math.round(minutes * 60) }) };
  return call(client.POST("/api/nodes/{node_id}/drain", { params: of(id), body }));
}

/** Takes it into service again. */
export function resume(id: string, reason = "") {
  return call(client.POST("/api/nodes/{node_id}/resume", { params: of(id), body: because(reason) }));
}

/** Stops its worker, which drains itself first. The answer names the operation. */
export function stop(id: string, reason = "") {
  return call(client.POST("/api/nodes/{node_id}/stop", { params: of(id), body: because(reason) }));
}

/** Sets these labels; the others stay. Answers the whole set. */
export function mergeLabels(id: string, labels: Record<string, string>) {
  return call(client.PATCH("/api/nodes/{node_id}/labels", { params: of(id), body: labels }));
}

/** Removes one label; there need not be one. */
export function removeLabel(id: string, key: string) {
  return call(client.DELETE("/api/nodes/{node_id}/labels/{key}", { params: { path: { node_id: id, key } } }));
}

/** Removes the record. A running worker re-registers as a new, pending node. */
export function deregister(id: string) {
  return call(client.DELETE("/api/nodes/{node_id}", { params: of(id) }));
}

/** Permanently rejects its secret; the node is pending, without an identity. */
export function revoke(id: string, reason = "") {
  return call(client.POST("/api/nodes/{node_id}/identity/revoke", { params: of(id), body: because(reason) }));
}

/** Asks the worker to replace its secret. */
export function rotate(id: string) {
  return call(client.POST("/api/nodes/{node_id}/identity/rotate", { params: of(id) }));
}

/** The claimant is the node from now on. */
export function acceptConflict(id: string, conflict: string) {
  const path = { node_id: id, conflict_id: conflict };
  return call(client.POST("/api/nodes/{node_id}/conflicts/{conflict_id}/accept", { params: { path } }));
}

/** The node stays who it is. */
export function refuseConflict(id: string, conflict: string) {
  const path = { node_id: id, conflict_id: conflict };
  return call(client.POST("/api/nodes/{node_id}/conflicts/{conflict_id}/refuse", { params: { path } }));
}

type Bulk = components["schemas"]["Bulk"];

/** Runs a verb on many nodes: one operation of the server, which goes on without this page. */
export function onAll(verb: Bulk["verb"], nodes: readonly Pick<LiveNode, "id">[], options: Omit<Bulk, "verb" | "ids"> = {}) {
  const { reason, ...otherOptions } = options;
  const body = { verb, ids: nodes.map((node) => node.id), ...because(reason ?? ""), ...otherOptions };
  return call(client.POST("/api/nodes/bulk", { body }));
}

type Refusal = (node: LiveNode) => string;

const RESUMABLE = new Set<LiveNode["status"]>(["offline", "draining", "unhealthy"]);

const REFUSALS: Readonly<Record<Verb, Refusal>> = {
  approve: (node) => {
    if (node.status !== "pending") return "already approved";
    return hasReported(node) ? "" : "no worker has registered since the secret was revoked";
  },
  reject: (node) => {
    if (node.status !== "pending") return "not pending";
    return node.rejected === null ? "" : "already rejected";
  },
  drain: (node) => {
    if (node.status === "pending") return "pending: receives no work";
    return node.drain !== null && !node.drain.own ? "already draining" : "";
  },
  resume: (node) => {
    if (node.status === "pending") return "pending: approve it first";
    return RESUMABLE.has(node.status) ? "" : "already in service";
  },
  stop: (node) => {
    if (node.node_type === "agent") return "an agent is stopped on its machine";
    if (node.status === "pending") return "pending: not connected to the message bus";
    return node.status === "offline" ? "already offline" : "";
  },
  label: () => "",
  install: (node) => {
    if (node.node_type === "agent") return "agents do not run backends";
    return node.status === "pending" ? "pending: approve it first" : "";
  },
  rotate: (node) => {
    if (node.fingerprint === "") return "has no secret of its own";
    return node.rotation_requested_at === null ? "" : "rotation already requested";
  },
  revoke: (node) => (hasReported(node) ? "" : "has no identity to revoke"),
  deregister: () => "",
};

function hasReported(node: LiveNode): boolean {
  return node.fingerprint !== "" || node.weak_identity;
}

/** Why `verb` makes no sense for the node as it is now; "" if it does. The server decides in the end. */
export function refusal(verb: Verb, node: LiveNode): string {
  return REFUSALS[verb](node);
}
