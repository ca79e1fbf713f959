// Texts about a node: sources of its facts, its conditions, and the word that a dangerous
// action wants typed. Pure.
import { count } from "../../lib/format";
import type { LiveModel, LiveNode, Operation } from "../../live/messages";
import type { NodeDetail } from "./data";

const WORKER = "worker";

/** "by anna", "by the worker"; "" if that is not known. */
export function by(actor: string): string {
  if (actor === "") return "";
  return actor === WORKER ? "by the worker" : `by ${actor}`;
}

/** The source of a value. */
export function provenance(override: { by: string } | undefined, manuallySet: boolean): string {
  // Not "reported": between a hand-back and the next registration it is still what the administrator had set.
  if (!manuallySet) return "Worker default";
  return override === undefined || override.by === "" ? "Set by an administrator" : `Set ${by(override.by)}`;
}

export interface Condition {
  id: string;
  tone: "good" | "warn" | "bad" | "info";
  title: string;
  at: string | null;
  by: string;
  reason: string;
  /** When it is checked next. */
  next?: string | null;
}

interface ConditionText {
  at: string;
  by: string;
  reason: string;
}

function condition(id: string, tone: Condition["tone"], title: string, fact: ConditionText): Condition {
  return { id, tone, title, at: fact.at, by: by(fact.by), reason: fact.reason };
}

/** The conditions behind the status, worst first; `detail` may not be loaded yet. */
export function conditions(node: LiveNode, detail: NodeDetail | undefined): Condition[] {
  const result: Condition[] = [];
  if (node.revoked !== null) result.push(condition("revoked", "bad", "Secret revoked", node.revoked));
  if (node.rejected !== null) result.push(condition("rejected", "bad", "Rejected", node.rejected));
  result.push(approval(node, detail));
  if (detail?.offline !== undefined) result.push(condition("offline", "bad", "Offline", detail.offline));
  if (detail?.unhealthy !== undefined) result.push(condition("unhealthy", "bad", "Unhealthy", detail.unhealthy));
  if (node.file_port !== null) {
    const { error, since, next_check_at: next } = node.file_port;
    result.push({ id: "file-port", tone: "bad", title: "File port unreachable", at: since, by: "", reason: error, next });
  }
  if (node.drain !== null) {
    const title = node.drain.own ? "Draining (worker shutting down)" : "Draining";
    result.push(condition("drain", "info", title, { ...node.drain, at: node.drain.since }));
  }
  return result;
}

function approval(node: LiveNode, detail: NodeDetail | undefined): Condition {
  if (node.status === "pending") {
    return condition("approval", "warn", "Awaiting approval", { at: node.created_at, by: "", reason: "" });
  }
  if (detail?.approval === undefined) return { id: "approval", tone: "good", title: "Approved", at: null, by: "", reason: "" };
  return condition("approval", "good", "Approved", detail.approval);
}

/** The work that a drain still waits for; null if the node is not drained. */
export function drainLeft(node: LiveNode, operations: number): { safe: boolean; text: string } | null {
  if (node.drain === null || node.status === "pending") return null;
  if (node.in_flight_count > 0 || node.models.length > 0) {
    return { safe: false, text: `${count(node.in_flight_count, "request")} in flight, ${count(node.models.length, "replica")} left` };
  }
  if (operations > 0) return { safe: false, text: `No replicas left, ${count(operations, "operation")} in progress` };
  if (node.drain.engines_gone_at !== null) return { safe: true, text: "Safe to power off" };
  if (node.status === "offline") return { safe: false, text: "No replicas left; stop not confirmed: the node is offline" };
  if (node.drain.engines_error !== "") {
    return { safe: false, text: `No replicas left; stop not confirmed: ${node.drain.engines_error}` };
  }
  return { safe: false, text: "No replicas left; stopping engines" };
}

const TYPEABLE = /^[\x21-\x7e]+( [\x21-\x7e]+)*$/;
const LONGEST_TYPED = 40;

/** The word to type before a destructive action: the name, or the start of the ID if the name is hard to type. */
export function confirmationWord(node: { id: string; name: string }): string {
  return node.name.length <= LONGEST_TYPED && TYPEABLE.test(node.name) ? node.name : node.id.slice(0, 8);
}

/** True if the operation is about this node, alone or among others. */
export function concerns(operation: Operation, id: string): boolean {
  return operation.nodeID === id || (operation.nodes ?? []).some((target) => target.node_id === id);
}

/** A backend's name without the gallery that it came from, as names are compared. */
function plainName(name: string): string {
  return name.slice(name.lastIndexOf("@") + 1).toLowerCase();
}

/** True if the operation is about this backend. */
export function onBackend(operation: Operation, name: string): boolean {
  return operation.isBackend && plainName(operation.name) === plainName(name);
}

/** The node's replicas whose backend type is this backend. */
export function usersOf(node: LiveNode, name: string): LiveModel[] {
  return node.models.filter((model) => plainName(model.backend_type) === plainName(name));
}
