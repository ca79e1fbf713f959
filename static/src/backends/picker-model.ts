// The picker's text about a node: the effect before the press, the server's answer after it.
// Pure; mirrors what the server refuses and nothing more.
import { advice, ApiError } from "../api/client";
import type { components } from "../api/schema";
import type { LiveNode, Operation } from "../live/messages";
import { isActive } from "../live/store";
import { targetsOf, type Target } from "../operations/model";
import { ENDED, phaseOf, stateOf } from "../operations/words";

type Job = components["schemas"]["Job"];

/** The effect on a node. */
export interface Eligibility {
  kind: "install" | "there" | "joins" | "waits" | "refused";
  text: string;
}

/** The state of a request: sending, refused, or accepted as an operation. `at`: ms of this browser; `theirs`: somebody else's. */
export type Sent =
  | { step: "sending" }
  | { step: "refused"; error: Error }
  | { step: "accepted"; jobID: string; at: number; theirs?: boolean };

export interface Progress {
  tone: "" | "info" | "warn" | "good" | "bad";
  word: string;
  detail: string;
  /** Percent while it is worth a bar. */
  value: number | null;
  ended: "no" | "well" | "badly";
}

/** The plain name of a backend: `localai@echo` and `echo` are the same on a node. */
export function plain(backend: string): string {
  return backend.slice(backend.lastIndexOf("@") + 1);
}

export function has(node: LiveNode, backend: string): boolean {
  const name = plain(backend).toLowerCase();
  return node.backends.some((installed) => installed.toLowerCase() === name);
}

/** The running or waiting operation for this backend, by node. */
export function underWayFor(backend: string, operations: Iterable<Operation>): Map<string, Operation> {
  const operationsByNode = new Map<string, Operation>();
  for (const operation of operations) {
    if (!operation.isBackend || !isActive(operation) || operation.name !== plain(backend)) continue;
    for (const target of targetsOf(operation)) if (!ENDED.has(target.status) && target.nodeID !== "") operationsByNode.set(target.nodeID, operation);
  }
  return operationsByNode;
}

export function eligibility(node: LiveNode, backend: string, underWay: Operation | undefined): Eligibility {
  if (node.node_type === "agent") return { kind: "refused", text: "Agent nodes do not run backends" };
  if (node.status === "pending") return { kind: "refused", text: "Not approved yet" };
  if (underWay !== undefined && underWay.kind !== "backend_install") {
    return { kind: "refused", text: "Another operation is in progress" };
  }
  if (underWay !== undefined) return { kind: "joins", text: "Installation already in progress" };
  if (has(node, backend)) return { kind: "there", text: "Already installed" };
  if (node.status === "offline") return { kind: "waits", text: "Offline: installs when the node is back" };
  if (node.status === "unhealthy") return { kind: "install", text: "Retries until the node responds" };
  if (node.status === "draining") return { kind: "refused", text: "Draining; resume the node first" };
  return { kind: "install", text: "Installs now" };
}

export function canInstall(expected: Eligibility): boolean {
  return expected.kind === "install" || expected.kind === "joins" || expected.kind === "waits";
}

const PARTS = new WeakMap<Operation, ReadonlyMap<string, Target>>();

/** Three hundred rows look for their part in the same operation. */
function targetsByNode(operation: Operation): ReadonlyMap<string, Target> {
  const targets = PARTS.get(operation) ?? new Map(targetsOf(operation).map((target) => [target.nodeID, target]));
  PARTS.set(operation, targets);
  return targets;
}

/** The operation as if it were for this node alone. */
export function onNode(operation: Operation, nodeID: string): Operation {
  const { nodes = [] } = operation;
  const target = nodes.length < 2 ? undefined : targetsByNode(operation).get(nodeID);
  if (target === undefined) return operation;
  const nodesOfTarget = nodes.filter((target) => target.node_id === nodeID);
  const nodeOperation = { ...operation, nodes: nodesOfTarget, progress: Math.floor(target.value), phase: target.phase, message: target.reason, attempts: target.attempts, lastProgressAt: target.lastProgressAt, timeLimitAt: target.timeLimitAt };
  return { ...nodeOperation, status: statusOf(target, operation), ...(target.error === "" ? {} : { error: target.error }) };
}

function statusOf({ status }: Target, operation: Operation): Operation["status"] {
  if (status === "success" || status === "completed") return "completed";
  if (status === "error" || status === "failed") return "failed";
  if (status === "cancelled" || status === "superseded") return "cancelled";
  if (status === "waiting") return "waiting_for_nodes";
  return status === "queued" || status === "retrying" ? "pending" : isActive(operation) ? "processing" : operation.status;
}

/** The progress of a request on a node. `job`: the server's record of a job that the feed no longer has. */
export function progressOf(sent: Sent, operation: Operation | undefined, job: Job | Error | undefined, nodeID = ""): Progress {
  if (sent.step === "sending") return { tone: "", word: "Sending", detail: "", value: null, ended: "no" };
  if (sent.step === "refused") return failed("Not sent", reasonOf(sent.error));
  if (operation !== undefined) return live(onNode(operation, nodeID));
  if (job instanceof ApiError && job.status === 404) return failed("Unknown", "The server has no record of this operation.");
  if (job === undefined || job instanceof Error) return { tone: "", word: "Sent", detail: "Waiting for a status update", value: null, ended: "no" };
  return recorded(job, nodeID);
}

/** The server's record of a job that the feed no longer has, for this node. */
function recorded(job: Job, nodeID: string): Progress {
  const target = job.nodes?.find((target) => target.node_id === nodeID);
  if (target?.status === "success") return INSTALLED;
  if (target?.status === "error") return failed("Failed", target.error ?? "");
  if (job.completed === true) return INSTALLED;
  if (job.processed) return job.error === undefined ? failed("Cancelled", "") : failed("Failed", job.error);
  return { tone: "info", word: "Installing", detail: job.message, value: Math.floor(job.progress), ended: "no" };
}

const INSTALLED: Progress = { tone: "good", word: "Installed", detail: "", value: null, ended: "well" };

function failed(word: string, detail: string): Progress {
  return { tone: "bad", word, detail, value: null, ended: "badly" };
}

function reasonOf(error: Error): string {
  const message = /[.!?]$/.test(error.message) ? error.message : `${error.message}.`;
  return error instanceof ApiError ? `${message} ${advice(error)}`.trim() : message;
}

function live(operation: Operation): Progress {
  const state = stateOf(operation);
  const detail = phaseOf(operation);
  switch (state) {
    case "completed":
      return INSTALLED;
    case "failed":
      return failed("Failed", operation.error ?? "No reason given");
    case "cancelled":
      return failed("Cancelled", "");
    case "queued":
      return { tone: "", word: "Queued", detail, value: null, ended: "no" };
    case "waiting":
      return { tone: "warn", word: "Waiting", detail, value: null, ended: "no" };
    case "retrying":
      return { tone: "warn", word: "Retrying", detail, value: null, ended: "no" };
    case "overdue":
      return { tone: "warn", word: "Running on the worker", detail, value: null, ended: "no" };
    case "running":
      return { tone: "info", word: "Installing", detail, value: operation.progress, ended: "no" };
  }
}

/** "2 of 3 done, 1 failed". */
export function tally(rows: readonly Progress[]): string {
  const well = rows.filter((row) => row.ended === "well").length;
  const badly = rows.filter((row) => row.ended === "badly").length;
  return `${well} of ${rows.length} done${badly > 0 ? `, ${badly} failed` : ""}`;
}

/** By name, or by a label written `key=value` (or `key=`: any value). */
export function matches(node: LiveNode, filter: string): boolean {
  const text = filter.trim().toLowerCase();
  if (text === "") return true;
  const [key = "", value = ""] = text.split("=", 2);
  const labelled = Object.entries(node.labels).some(
    ([name, held]) => name.toLowerCase() === key && held.toLowerCase().startsWith(value),
  );
  return node.name.toLowerCase().includes(text) || (text.includes("=") && labelled);
}
