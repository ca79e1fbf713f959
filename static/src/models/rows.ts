// Models as one list: what is defined, what runs, what is being loaded and what failed. Pure.
import { compareNames } from "../lib/format";
import { matchesWords } from "../lib/words";
import type { components } from "../api/schema";
import type { LiveModel, LiveNode, Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import type { Rule } from "../scheduling/rules";
import { readSort, writeSort, type Column, type Sort } from "../ui/rows";
import type { DefinitionRow } from "./shapes";

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
  definition: DefinitionRow | undefined;
  places: Places;
  /** Loads, unloads, imports and removals under way. */
  active: readonly Operation[];
  /** Those that failed, not dismissed. */
  failed: readonly Operation[];
  rule: Rule | undefined;
  /** Requests a second over the last minute; null if not known. */
  rate: number | null;
}

/** What the list is made of. Rules and rates are empty as long as they are not known. */
export interface Facts {
  definitions: readonly DefinitionRow[];
  nodes: Iterable<LiveNode>;
  operations: Iterable<Operation>;
  rules: readonly Rule[];
  rates: ReadonlyMap<string, number>;
}

/** The replicas by model, by node and number. */
export function placesOf(nodes: Iterable<LiveNode>): Map<string, Place[]> {
  const places = new Map<string, Place[]>();
  const sorted = [...nodes].sort((left, right) => compareNames(left.name, right.name));
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

/** True if an operation of this kind is work on a model. */
export function isOfModel({ kind }: Pick<Operation, "kind">): boolean {
  return kind.startsWith("model_") || kind === "definition_delete";
}

/** Every model by name. A row that is as it was stays the object of `previous`. */
export function modelRows({ definitions, nodes, operations, rules, rates }: Facts, previous: readonly ModelRow[] = []): ModelRow[] {
  const places = placesOf(nodes);
  const defined = new Map(definitions.map((definition) => [definition.name, definition]));
  const ruled = new Map(rules.map((rule) => [rule.model_name, rule]));
  const before = new Map(previous.map((row) => [row.name, row]));
  const work = new Map<string, Operation[]>();
  for (const operation of operations) {
    if (!isOfModel(operation) || !(isActive(operation) || needsAttention(operation))) continue;
    work.set(operation.fullName, [...(work.get(operation.fullName) ?? []), operation]);
  }
  const names = [...new Set([...defined.keys(), ...places.keys(), ...work.keys()])];
  return names.sort(compareNames).map((name) => {
    const mine = (work.get(name) ?? []).sort((left, right) => left.seq - right.seq);
    const row = { name, definition: defined.get(name), places: places.get(name) ?? [], active: mine.filter(isActive), failed: mine.filter(needsAttention), rule: ruled.get(name), rate: rates.get(name) ?? null };
    const last = before.get(name);
    return last !== undefined && isAlike(last, row) ? last : row;
  });
}

function isAlike(left: ModelRow, right: ModelRow): boolean {
  return (
    left.definition === right.definition &&
    left.rule === right.rule &&
    left.rate === right.rate &&
    sameItems(left.active, right.active) &&
    sameItems(left.failed, right.failed) &&
    sameItems(left.places.map(({ model }) => model), right.places.map(({ model }) => model)) &&
    sameItems(left.places.map(({ node }) => node.name), right.places.map(({ node }) => node.name))
  );
}

function sameItems(left: readonly unknown[], right: readonly unknown[]): boolean {
  return left.length === right.length && left.every((item, index) => item === right[index]);
}

/** The states of a model, the ones that need attention first. */
export const STATES = ["unusable", "failed", "loading", "loaded", "unloading", "disabled", "idle"] as const;
export type ModelState = (typeof STATES)[number];

export function stateOf({ definition, places, active, failed }: ModelRow): ModelState {
  const has = (...states: LiveModel["state"][]) => places.some(({ model }) => states.includes(model.state));
  if (has("loaded")) return "loaded";
  if (has("loading", "staging") || active.some(({ kind }) => kind === "model_load" || kind === "model_import")) return "loading";
  if (definition?.state === "unusable") return "unusable";
  if (failed.length > 0) return "failed";
  if (places.length > 0) return "unloading";
  return definition?.state === "disabled" ? "disabled" : "idle";
}

/** Replicas that serve, and those that the rule wants: "1 / 2". */
export function replicaCount({ places, rule }: Pick<ModelRow, "places" | "rule">): { running: number; wanted: number | null } {
  const running = places.filter(({ model }) => model.state === "loaded").length;
  return { running, wanted: rule?.state?.wanted ?? (rule !== undefined && rule.min_replicas > 0 ? rule.min_replicas : null) };
}

export const SHOWN = ["all", "running", "idle", "failed"] as const;
export type Shown = (typeof SHOWN)[number];

/** The view of the list: words in name or backend, the state, the order. */
export interface ModelFilter {
  term: string;
  shown: Shown;
  sort: Sort;
}

const BY_NAME: Sort = { key: "name", descending: false };

/** `columns` say by what the list can be sorted. */
export function parseFilter(query: URLSearchParams, columns: readonly Column<never>[]): ModelFilter {
  const shown = query.get("show");
  return { term: query.get("q") ?? "", shown: SHOWN.find((option) => option === shown) ?? "all", sort: readSort(query.get("sort"), columns) ?? BY_NAME };
}

export function addressOf({ term, shown, sort }: ModelFilter): URLSearchParams {
  const order = writeSort(sort);
  return new URLSearchParams({ ...(term === "" ? {} : { q: term }), ...(shown === "all" ? {} : { show: shown }), ...(order === BY_NAME.key ? {} : { sort: order }) });
}

export function filterRows(rows: readonly ModelRow[], { term, shown }: Pick<ModelFilter, "term" | "shown">): ModelRow[] {
  return rows.filter((row) => isShown(row, shown) && matchesWords(term, `${row.name} ${backendOf(row)}`));
}

function isShown(row: ModelRow, shown: Shown): boolean {
  if (shown === "failed") return row.failed.length > 0 || row.definition?.state === "unusable";
  return shown === "all" || (row.places.length > 0) === (shown === "running");
}

/** The backend that it is defined for, else that of a replica. */
export function backendOf(row: ModelRow): string {
  return row.definition?.backend ?? row.places[0]?.model.backend_type ?? "";
}

/** Why it cannot be loaded now; "" if it can. */
export function loadRefusal({ definition }: Pick<ModelRow, "definition">): string {
  if (definition === undefined) return "not defined on this server";
  if (definition.state === "unusable") return "its definition cannot be used";
  return definition.state === "disabled" ? "disabled" : "";
}

/** True if it neither runs nor is being loaded. */
export function isIdle({ places, active }: Pick<ModelRow, "places" | "active">): boolean {
  return places.length === 0 && !active.some(({ kind }) => kind === "model_load");
}

/** Why it cannot be unloaded from all nodes now; "" if it can. */
export function unloadRefusal(row: ModelRow): string {
  if (row.places.length === 0) return "not loaded";
  return row.active.some((operation) => operation.kind === "model_unload" && operation.nodeID === undefined) ? "already being unloaded" : "";
}

/** Why its definition cannot be deleted here; "" if it can. A file is the administrator's. */
export function deleteRefusal({ definition, active }: Pick<ModelRow, "definition" | "active">): string {
  if (definition === undefined) return "not defined on this server";
  if (definition.origin === "file") return "defined by a file in the models folder; remove the file";
  return active.some(({ kind }) => kind === "definition_delete") ? "already being deleted" : "";
}

/** True if a person can talk to it. */
export function canTalk({ definition }: Pick<ModelRow, "definition">): boolean {
  return definition !== undefined && (definition.state === "active" || definition.state === "shadowed") && definition.use_cases.includes("chat");
}

/** The address of a model's page. A model called "add" has one too. */
export function modelAddress(name: string, tab = ""): string {
  const path = `/app/models/${encodeURIComponent(name)}`;
  return tab === "" && name !== "add" ? path : `${path}/${tab || "overview"}`;
}
