// The view of the nodes in the page's address: `?q=&state=&type=&gpu=&label=&sort=&columns=&rows=`. The facets
// count what choosing one more value would show: all other conditions hold, their own does not. Pure.
import { keep, recall } from "../../lib/storage";
import type { LiveNode } from "../../live/messages";
import { readSort, writeSort, type Sort } from "../../ui/rows";
import { written } from "../shared/labels";
import { shownStatus, type ShownStatus } from "../shared/node-status";
import { COLUMNS, DEFAULT_SORT } from "./columns";
import { matches, parse, type Query } from "./query";

export const FACETS = ["state", "type", "gpu", "label"] as const;
export type Facet = (typeof FACETS)[number];

export interface Filter {
  q: string;
  chosen: Readonly<Record<Facet, readonly string[]>>;
  sort: Sort;
  /** The keys of the shown columns. */
  columns: readonly string[];
  /** One line in each row. */
  dense: boolean;
}

export type SetFilter = (change: (previous: Filter) => Filter) => void;

export const NOTHING_CHOSEN: Filter["chosen"] = { state: [], type: [], gpu: [], label: [] };

/** In the order of "needs attention first". */
export const STATES: readonly ShownStatus[] = ["pending", "offline", "unhealthy", "draining", "healthy", "rejected"];

/** The GPU of a node without one. */
export const NO_GPU = "none";

const STANDARD = COLUMNS.filter(({ extra }) => extra !== true).map(({ key }) => key);
const VIEW = "nodes-view";

/** Columns and row height come from the address, else from the last visit in this browser. */
export function readFilter(params: URLSearchParams): Filter {
  const listed = (name: string) => unique((params.get(name) ?? "").split(","));
  const chosen = { state: listed("state"), type: listed("type"), gpu: unique(params.getAll("gpu")), label: unique(params.getAll("label")) };
  const remembered = new URLSearchParams(recall(VIEW) ?? "");
  const view = (name: string) => params.get(name) ?? remembered.get(name) ?? "";
  const keys = view("columns").split(",").filter(Boolean);
  const columns = keys.length === 0 ? STANDARD : COLUMNS.map(({ key }) => key).filter((key) => key === "name" || keys.includes(key));
  return { q: params.get("q") ?? "", chosen, sort: readSort(params.get("sort"), COLUMNS) ?? DEFAULT_SORT, columns, dense: view("rows") !== "roomy" };
}

/** The filter with these columns and row height, which this browser remembers. */
export function withView(filter: Filter, view: Pick<Filter, "columns" | "dense">): Filter {
  keep(VIEW, new URLSearchParams({ columns: view.columns.join(","), rows: view.dense ? "dense" : "roomy" }).toString());
  return { ...filter, ...view };
}

function unique(values: readonly string[]): string[] {
  return [...new Set(values)].filter((value) => value !== "");
}

/** The shortest address that reads back as the same filter. */
export function writeFilter({ q, chosen, sort, columns, dense }: Filter): URLSearchParams {
  const params = new URLSearchParams();
  if (q.trim() !== "") params.set("q", q.trim());
  for (const name of ["state", "type"] as const) {
    if (chosen[name].length > 0) params.set(name, chosen[name].join(","));
  }
  // Labels and the names of GPUs may have commas in them.
  for (const name of ["gpu", "label"] as const) for (const value of chosen[name]) params.append(name, value);
  if (sort.key !== DEFAULT_SORT.key || sort.descending !== DEFAULT_SORT.descending) params.set("sort", writeSort(sort));
  if (columns.join() !== STANDARD.join()) params.set("columns", columns.join(","));
  if (!dense) params.set("rows", "roomy");
  return params;
}

/** True if it hides anything. */
export function isFiltering(filter: Filter): boolean {
  return filter.q.trim() !== "" || FACETS.some((facet) => filter.chosen[facet].length > 0);
}

/** The filter that hides nothing; the order stays. */
export function cleared(filter: Filter): Filter {
  return { ...filter, q: "", chosen: NOTHING_CHOSEN };
}

/** The filter with `value` of `facet` turned on or off. */
export function toggled(filter: Filter, facet: Facet, value: string): Filter {
  const previous = filter.chosen[facet];
  const after = previous.includes(value) ? previous.filter((chosen) => chosen !== value) : [...previous, value];
  return { ...filter, chosen: { ...filter.chosen, [facet]: after } };
}

export type Counts = Readonly<Record<Facet, ReadonlyMap<string, number>>>;

export interface FilterResult {
  nodes: LiveNode[];
  counts: Counts;
  /** The parts of the text that are invalid. */
  problems: readonly string[];
}

function noCounts(): Record<Facet, Map<string, number>> {
  return { state: new Map(), type: new Map(), gpu: new Map(), label: new Map() };
}

/** The filtered nodes, unsorted, and the number of nodes for each value of each facet. */
export function find(nodes: Iterable<LiveNode>, filter: Filter): FilterResult {
  const nodeList = [...nodes];
  const query = parse(filter.q, nodeList);
  const matching: LiveNode[] = [];
  const counts = noCounts();
  for (const node of nodeList) {
    const misses = missed(node, query, filter);
    if (misses.length === 0) matching.push(node);
    for (const facet of misses.length === 0 ? FACETS : misses.length === 1 ? misses : []) {
      if (facet === "text") continue;
      for (const value of VALUES[facet](node)) counts[facet].set(value, (counts[facet].get(value) ?? 0) + 1);
    }
  }
  return { nodes: matching, counts, problems: query.problems };
}

function missed(node: LiveNode, query: Query, { chosen }: Filter): (Facet | "text")[] {
  const misses: (Facet | "text")[] = FACETS.filter((facet) => !fits(node, facet, chosen[facet]));
  if (!matches(query, node)) misses.push("text");
  return misses;
}

function fits(node: LiveNode, facet: Facet, chosen: readonly string[]): boolean {
  if (chosen.length === 0) return true;
  const has = VALUES[facet](node);
  if (facet !== "label") return has.some((value) => chosen.includes(value));
  // Two values of one key mean either; two keys mean both.
  const keys = new Map(chosen.map((label) => [keyOf(label), false]));
  for (const label of has) if (chosen.includes(label)) keys.set(keyOf(label), true);
  return [...keys.values()].every(Boolean);
}

function keyOf(label: string): string {
  return label.split("=", 1)[0] ?? label;
}

/** Labels that are no use in a facet: each node has its own, or something else shows them. */
const NO_FACET = new Set(["node.name", "node.replica-slots", "gpu.vendor"]);

const VALUES: Readonly<Record<Facet, (node: LiveNode) => readonly string[]>> = {
  state: (node) => [shownStatus(node)],
  type: (node) => [node.node_type],
  gpu: (node) => (node.gpu_vendor === "" ? [NO_GPU] : [...new Set([node.gpu_vendor, ...node.gpus.map(({ name }) => name)])]),
  label: (node) =>
    Object.entries(node.labels)
      .filter(([key]) => !NO_FACET.has(key))
      .map(([key, value]) => written(key, value)),
};
