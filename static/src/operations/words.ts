// How operations are put into words: what is done, what was done, what could not be done, what is waited for.
// Pure. One place, so that the strip, the cards and the announcements say the same.
import { count } from "../lib/format";
import type { Operation } from "../live/messages";

/** How an operation is, for people: `waiting` is queued with a reason. */
export type State = "queued" | "waiting" | "running" | "failed" | "completed" | "cancelled";

type Kind = Pick<Operation, "kind" | "isBackend" | "isDeletion" | "taskType">;

export function stateOf(operation: Operation): State {
  switch (operation.status) {
    case "waiting_for_nodes":
      return "waiting";
    case "pending":
      return ["", "queued"].includes(operation.message) ? "queued" : "waiting";
    case "processing":
      return "running";
    default:
      return operation.status;
  }
}

export function noun(kind: Pick<Kind, "isBackend">): string {
  return kind.isBackend ? "backend" : "model";
}

interface Verb {
  do: string;
  doing: string;
  done: string;
}

function verb(kind: Kind): Verb {
  if (kind.isDeletion) return { do: "remove", doing: "Removing", done: "Removed" };
  if (kind.taskType === "staging") return { do: "load", doing: "Loading", done: "Loaded" };
  if (kind.taskType === "upgrade") return { do: "upgrade", doing: "Upgrading", done: "Upgraded" };
  return { do: "install", doing: "Installing", done: "Installed" };
}

/** What comes before the name: "Installing backend", "Queued to load model", "Could not remove backend". */
export function phrase(kind: Kind, state: State): string {
  const words = verb(kind);
  const what = noun(kind);
  if (state === "queued") return `Queued to ${words.do} ${what}`;
  if (state === "waiting") return `Waiting to ${words.do} ${what}`;
  if (state === "failed") return `Could not ${words.do} ${what}`;
  if (state === "cancelled") return `Cancelled: ${words.do} ${what}`;
  if (state === "completed") return `${words.done} ${what}`;
  return `${words.doing} ${what}`;
}

/** What happened, for the list of what has ended: "installed in 40s", "removed", "cancelled". */
export function outcome(operation: Operation, took: string): string {
  if (operation.status === "cancelled") return "cancelled";
  if (operation.status === "failed") return "failed";
  const done = verb(operation).done.toLowerCase();
  return took === "" || operation.isDeletion ? done : `${done} in ${took}`;
}

/** "on gpu-1", "to gpu-1" for what is brought there, "on 3 nodes"; "" if no node is known. */
export function place(kind: Kind, names: readonly string[]): string {
  if (names.length > 1) return `on ${count(names.length, "node")}`;
  const name = names[0] ?? "";
  if (name === "") return "";
  return `${kind.taskType === "staging" ? "to" : "on"} ${name}`;
}

/** What a running or queued operation is at: its phase, else what it waits for. */
export function phaseOf(operation: Operation): string {
  const state = stateOf(operation);
  if (state === "queued") return "Waiting for a controller";
  if (state === "waiting") return operation.message;
  // A phase of "queued" is what it had before it was taken up.
  if (operation.phase !== undefined && !["", "queued"].includes(operation.phase)) return operation.phase.replaceAll("_", " ");
  return "Starting";
}
