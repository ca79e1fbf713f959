// Models as one list: what is defined, what runs, what is being loaded and what could not be. Pure.
import type { components } from "../api/schema";
import type { LiveModel, LiveNode, Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { count } from "../lib/format";

export type Definition = components["schemas"]["InstalledModel"];

/** A replica and its node. */
export interface Place {
  node: LiveNode;
  model: LiveModel;
}
export type Places = readonly Place[];

export interface ModelRow {
  name: string;
  /** Undefined for a model that runs or is loaded without a definition here. */
  definition: Definition | undefined;
  places: Places;
  /** Loads and unloads under way. */
  active: readonly Operation[];
  /** Loads that failed, not dismissed. */
  failed: readonly Operation[];
}

/** The replicas by model, by node and number. */
export function placesOf(nodes: Iterable<LiveNode>): Map<string, Place[]> {
  const places = new Map<string, Place[]>();
  const sorted = [...nodes].sort((left, right) => left.name.localeCompare(right.name, undefined, { numeric: true }));
  for (const node of sorted) {
    const models = [...node.models].sort((left, right) => left.replica_index - right.replica_index);
    for (const model of models) {
      const modelPlaces = places.get(model.model_name);
      if (modelPlaces === undefined) places.set(model.model_name, [{ node, model }]);
      else modelPlaces.push({ node, model });
    }
  }
  return places;
}

/** Every model by name. Definitions are undefined as long as they are not known. */
export function modelRows(definitions: readonly Definition[], nodes: Iterable<LiveNode>, operations: Iterable<Operation>): ModelRow[] {
  const places = placesOf(nodes);
  const defined = new Map(definitions.map((definition) => [definition.id, definition]));
  const work = new Map<string, Operation[]>();
  for (const operation of operations) {
    if (!operation.kind.startsWith("model_") || !(isActive(operation) || needsAttention(operation))) continue;
    work.set(operation.fullName, [...(work.get(operation.fullName) ?? []), operation]);
  }
  const names = [...new Set([...defined.keys(), ...places.keys(), ...work.keys()])];
  const { compare } = new Intl.Collator(undefined, { numeric: true });
  return names.sort(compare).map((name) => {
    const mine = (work.get(name) ?? []).sort((left, right) => left.seq - right.seq);
    return { name, definition: defined.get(name), places: places.get(name) ?? [], active: mine.filter(isActive), failed: mine.filter(needsAttention) };
  });
}

export const SHOWN = ["all", "running", "idle"] as const;
export type Shown = (typeof SHOWN)[number];

/** The filter of models: words in name or backend, and the state. */
export interface ModelFilter {
  term: string;
  shown: Shown;
}

export function parseFilter(query: URLSearchParams): ModelFilter {
  const shown = query.get("show");
  return { term: query.get("q") ?? "", shown: SHOWN.find((option) => option === shown) ?? "all" };
}

export function addressOf({ term, shown }: ModelFilter): URLSearchParams {
  return new URLSearchParams({ ...(term === "" ? {} : { q: term }), ...(shown === "all" ? {} : { show: shown }) });
}

export function filterRows(rows: readonly ModelRow[], { term, shown }: ModelFilter): ModelRow[] {
  const words = term.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) => {
    if (shown !== "all" && (row.places.length > 0) !== (shown === "running")) return false;
    const text = `${row.name} ${backendOf(row)}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** The number of serving replicas; if there is none, the state of those that exist. */
export function replicaWords({ places }: Pick<ModelRow, "places">): { tone: "good" | "info" | "warn" | ""; words: string } {
  const inState = (...states: LiveModel["state"][]) => places.filter(({ model }) => states.includes(model.state)).length;
  if (inState("loaded") > 0) return { tone: "good", words: count(inState("loaded"), "replica") };
  if (inState("loading", "staging") > 0) return { tone: "info", words: `${inState("loading", "staging")} loading` };
  return places.length > 0 ? { tone: "warn", words: `${places.length} unloading` } : { tone: "", words: "not running" };
}

/** The backend that it is defined for, else that of a replica. */
export function backendOf(row: ModelRow): string {
  return row.definition?.backend ?? row.places[0]?.model.backend_type ?? "";
}

/** Why it cannot be loaded now; "" if it can. */
export function loadRefusal(row: ModelRow): string {
  if (row.definition === undefined) return "not defined on this server";
  if (row.places.some(({ model }) => model.state === "loaded")) return "already loaded; a rule asks for more replicas";
  return row.active.some((operation) => operation.kind === "model_load") ? "already being loaded" : "";
}

/** Why it cannot be unloaded from all nodes now; "" if it can. */
export function unloadRefusal(row: ModelRow): string {
  if (row.places.length === 0) return "not loaded";
  return row.active.some((operation) => operation.kind === "model_unload" && operation.nodeID === undefined) ? "already being unloaded" : "";
}
