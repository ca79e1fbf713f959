// The filter of the Activity page, which is in the address. Pure.
import { matchesWords } from "../lib/words";
import type { Operation } from "../live/messages";

export type Show = "all" | "models" | "backends" | "cluster";

export const SHOWS: readonly { show: Show; label: string }[] = [
  { show: "all", label: "All" },
  { show: "models", label: "Models" },
  { show: "backends", label: "Backends" },
  { show: "cluster", label: "Cluster" },
];

/** The choice in the address; everything if it is invalid. */
export function showIn(query: URLSearchParams): Show {
  const requested = query.get("show");
  return SHOWS.find((choice) => choice.show === requested)?.show ?? "all";
}

/** The filter: a kind of operations, and a search. */
export interface Choice {
  show: Show;
  q: string;
}

export const EVERYTHING: Choice = { show: "all", q: "" };

/** The state in the address. */
export function choiceIn(query: URLSearchParams): Choice {
  return { show: showIn(query), q: query.get("q") ?? "" };
}

/** The address of that choice. */
export function addressOf({ show, q }: Choice): URLSearchParams {
  return new URLSearchParams({ ...(show === "all" ? {} : { show }), ...(q === "" ? {} : { q }) });
}

/** True if every word of the search is in the operation's texts. */
export function finds(q: string, operation: Operation): boolean {
  if (q === "") return true;
  const { name, kind, nodeName, nodes, actor, status, message, error, jobID } = operation;
  const places = (nodes ?? []).map((node) => node.node_name);
  return matchesWords(q, [name, kind, nodeName, ...places, actor, status, message, error, jobID].join(" "));
}

/** Cluster: what happens on a node of its own, the loading of models too. */
export function shows(show: Show, operation: Operation): boolean {
  if (show === "models") return !operation.isBackend && !operation.kind.startsWith("node_");
  if (show === "backends") return operation.isBackend;
  if (show === "cluster") {
    const onNode = (operation.nodeID ?? "") !== "" || (operation.nodes ?? []).length > 0;
    return onNode || operation.taskType === "staging";
  }
  return true;
}

/** Operations that ended while the page was open, latest first. */
export function endedOf(operations: Iterable<Operation>): Operation[] {
  return [...operations]
    .filter((operation) => operation.finishedAt !== undefined && (operation.status !== "failed" || operation.dismissedAt !== undefined))
    .sort((left, right) => Date.parse(right.finishedAt ?? "") - Date.parse(left.finishedAt ?? ""));
}

/** Seconds from the first attempt to the end; negative if that is not known. */
export function tookOf(operation: Operation): number {
  const { startedAt, finishedAt } = operation;
  if (startedAt === undefined || finishedAt === undefined) return -1;
  const took = (Date.parse(finishedAt) - Date.parse(startedAt)) / 1000;
  return Number.isFinite(took) ? took : -1;
}
