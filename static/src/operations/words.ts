// The texts of operations: running, ended, failed, waiting.
// Pure. One place, so that the strip, the cards and the announcements say the same.
import { count } from "../lib/format";
import type { Operation, OperationTarget } from "../live/messages";

/**
 * How an operation is, for people. `waiting`: queued with a reason, such as its node. `retrying`: an attempt failed, the
 * next one has its time. `overdue`: the time limit has passed, and the worker may still be busy with it.
 */
export type State = "queued" | "waiting" | "retrying" | "running" | "overdue" | "failed" | "completed" | "cancelled";

type Kind = Pick<Operation, "kind" | "isBackend" | "isDeletion" | "taskType">;

const PLAINLY_QUEUED = ["", "queued"];

/** The state of a target; `waiting`, `retrying` and `overdue` as of an operation. */
export type TargetState = Exclude<OperationTarget["status"], "running_on_worker"> | State;

export const ENDED: ReadonlySet<TargetState> = new Set(["success", "error", "failed", "completed", "cancelled", "superseded"]);

/** The target's own state, apart from its operation. */
export function ownState(target: OperationTarget): TargetState {
  if (ENDED.has(target.status as TargetState)) return target.status as TargetState;
  if (target.overdueSince !== undefined) return "overdue";
  if (target.status !== "queued") return target.status === "running_on_worker" ? "running" : target.status;
  // Without a time for its next attempt it waits for its node, however many attempts there were.
  if ((target.attempts ?? 0) > 0 && target.nextLookAt !== undefined) return "retrying";
  return PLAINLY_QUEUED.includes(target.reason ?? "") ? "queued" : "waiting";
}

export function stateOf(operation: Operation): State {
  if (!["pending", "processing", "waiting_for_nodes"].includes(operation.status)) return operation.status as State;
  const remaining = (operation.nodes ?? []).map(ownState).filter((state) => !ENDED.has(state));
  if (remaining.length > 0 && remaining.every((state) => state === "overdue")) return "overdue";
  if (operation.status === "processing") return "running";
  if (operation.status === "waiting_for_nodes") return "waiting";
  if (remaining.length > 1) return remaining.includes("queued") ? "queued" : remaining.includes("retrying") ? "retrying" : "waiting";
  if (PLAINLY_QUEUED.includes(operation.message)) return "queued";
  return operation.attempts > 0 ? "retrying" : "waiting";
}

/** The address of its page, which holds also after its end. */
export function pageOf({ jobID }: Pick<Operation, "jobID">): string {
  return `/app/operations/${jobID}`;
}

/** True if it rests for a reason that people can read. */
export function rests(state: State): boolean {
  return state === "waiting" || state === "retrying" || state === "overdue";
}

interface Verb {
  do: string;
  doing: string;
  done: string;
}

interface Words extends Verb {
  /** In the filter of History. */
  label: string;
  /** "" for an action over many nodes: the operation's name says how many. */
  noun: string;
}

const REMOVE: Verb = { do: "remove", doing: "Removing", done: "Removed" };
const LOAD: Verb = { do: "load", doing: "Loading", done: "Loaded" };
const UPGRADE: Verb = { do: "upgrade", doing: "Upgrading", done: "Upgraded" };
const INSTALL: Verb = { do: "install", doing: "Installing", done: "Installed" };

/** One line for each kind of operation. */
const WORDS: Readonly<Record<string, Words>> = {
  backend_install: { label: "Backend install", noun: "backend", ...INSTALL },
  backend_upgrade: { label: "Backend upgrade", noun: "backend", ...UPGRADE },
  backend_delete: { label: "Backend removal", noun: "backend", ...REMOVE },
  model_load: { label: "Model load", noun: "model", ...LOAD },
  model_unload: { label: "Model unload", noun: "model", do: "unload", doing: "Unloading", done: "Unloaded" },
  model_delete: { label: "Model removal", noun: "model", ...REMOVE },
  model_import: { label: "Model import", noun: "model", do: "import", doing: "Importing", done: "Imported" },
  model_files_remove: { label: "Removal of unused files", noun: "unused", ...REMOVE },
  definition_delete: { label: "Definition removal", noun: "model", do: "delete", doing: "Deleting", done: "Deleted" },
  node_stop: { label: "Node stop", noun: "node", do: "stop", doing: "Stopping", done: "Stopped" },
  node_approve: { label: "Approve nodes", noun: "", do: "approve", doing: "Approving", done: "Approved" },
  node_reject: { label: "Reject nodes", noun: "", do: "reject", doing: "Rejecting", done: "Rejected" },
  node_drain: { label: "Drain nodes", noun: "", do: "drain", doing: "Draining", done: "Set to draining:" },
  node_resume: { label: "Resume nodes", noun: "", do: "resume", doing: "Resuming", done: "Resumed" },
  node_label: { label: "Label nodes", noun: "", do: "label", doing: "Labelling", done: "Labelled" },
  node_remove: { label: "Remove nodes", noun: "", ...REMOVE },
};

/** The kinds that History can be filtered by. */
export const KINDS: readonly (readonly [kind: string, label: string])[] = Object.entries(WORDS).map(([kind, { label }]) => [kind, label]);

/** The name of a kind, for an operation of which no more is known. */
export function labelOf(kind: string): string {
  return WORDS[kind]?.label ?? kind.replaceAll("_", " ");
}

/** True if it is an action over many nodes, whose name says how many. */
function isOfNodes({ kind }: Pick<Kind, "kind">): boolean {
  return WORDS[kind]?.noun === "";
}

export function noun({ kind, isBackend }: Pick<Kind, "kind" | "isBackend">): string {
  return WORDS[kind]?.noun ?? (isBackend ? "backend" : "model");
}

function verb({ kind, isDeletion, taskType }: Kind): Verb {
  const words = WORDS[kind];
  if (words !== undefined) return words;
  // A kind of a later server: the text follows from the type of its task.
  if (isDeletion) return REMOVE;
  if (taskType === "staging") return LOAD;
  return taskType === "upgrade" ? UPGRADE : INSTALL;
}

/** The request without a name: "Install backend". */
export function request(kind: Kind): string {
  const words = verb(kind).do;
  return `${words.slice(0, 1).toUpperCase()}${words.slice(1)} ${noun(kind)}`.trim();
}

/** The text before the name: "Installing backend", "Queued to load model", "Could not remove backend". */
export function phrase(kind: Kind, state: State): string {
  return sentence(verb(kind), noun(kind), state).trim();
}

function sentence(words: Verb, object: string, state: State): string {
  if (state === "queued") return `Queued to ${words.do} ${object}`;
  if (state === "waiting") return `Waiting to ${words.do} ${object}`;
  if (state === "retrying") return `Retrying to ${words.do} ${object}`;
  if (state === "failed") return `Could not ${words.do} ${object}`;
  if (state === "cancelled") return `Cancelled: ${words.do} ${object}`;
  if (state === "completed") return `${words.done} ${object}`;
  return `${words.doing} ${object}`;
}

/** "upgrading": what a running operation does, within a sentence. */
export function doing(kind: Kind): string {
  return verb(kind).doing.toLowerCase();
}

/** The outcome, for the list of ended operations: "installed in 40s", "removed", "40 cancelled, 60 had already finished (by anna)". */
export function outcome(operation: Operation, took: string): string {
  // The server has counted: nodes that were left out or cancelled before do not count.
  if (operation.status === "cancelled" && (operation.nodes ?? []).length > 1) return operation.message || "cancelled";
  if (operation.status === "cancelled") return "cancelled";
  if (operation.status === "failed") return "failed";
  const done = verb(operation).done.toLowerCase();
  return took === "" || operation.isDeletion ? done : `${done} in ${took}`;
}

/** "on gpu-1", "to gpu-1" for what is brought there, "on 3 nodes"; "" if no node is known. */
export function place(kind: Kind, names: readonly string[]): string {
  if (isOfNodes(kind)) return "";
  if (names.length > 1) return `on ${count(names.length, "node")}`;
  const name = names[0] ?? "";
  if (name === "") return "";
  return `${kind.taskType === "staging" ? "to" : "on"} ${name}`;
}

/** The nodes of an operation. */
export function placeOf(operation: Operation): string {
  const names = (operation.nodes ?? []).map((node) => node.node_name);
  return place(operation, names.length > 0 ? names : [operation.nodeName ?? ""]);
}

/** The nodes beside an outcome, which may have counted them. */
export function outcomePlace(operation: Operation): string {
  return operation.status === "cancelled" && (operation.nodes ?? []).length > 1 ? "" : placeOf(operation);
}

/** The server's text about the files that a load sends: which one of how many, bytes, rate, time left. */
export function sendingOf(operation: Operation): string {
  return stateOf(operation) === "running" && operation.phase === "staging" ? operation.message : "";
}

/** The phase of a running or queued operation, else what it waits for. */
export function phaseOf(operation: Operation): string {
  const state = stateOf(operation);
  if (state === "queued") return "Waiting for a controller";
  if (rests(state)) return operation.message;
  // A phase of "queued" is what it had before it was taken up.
  if (operation.phase === "staging") return operation.message || "sending files";
  if (operation.phase !== undefined && !["", "queued"].includes(operation.phase)) return operation.phase.replaceAll("_", " ");
  return "Starting";
}
