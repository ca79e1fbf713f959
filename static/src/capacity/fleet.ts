// The memory of the fleet as one picture: of each node its pools (a GPU each, or the whole), in groups, with sums. Pure.
import { gpuWords, usedVram, vramLimit } from "../live/gpus";
import type { LiveNode } from "../live/messages";
import { shownStatus } from "../nodes/shared/node-status";

export const RESOURCES = ["vram", "ram", "disk"] as const;
export type Resource = (typeof RESOURCES)[number];

/** Memory that one load can have as a whole. */
export interface Pool {
  /** "GPU 0"; "" for the whole of a node. */
  name: string;
  total: number;
  used: number;
  /** By loads, of what is not used yet. */
  reserved: number;
  free: number;
  utilization: number | null;
}

function pool(name: string, total: number, available: number, reserved: number, utilization: number | null = null): Pool {
  const open = Math.min(Math.max(available, 0), total);
  const held = Math.min(Math.max(reserved, 0), open);
  return { name, total, used: total - open, reserved: held, free: open - held, utilization };
}

/** The node's pools of the resource; none if it does not report any. */
export function poolsOf(node: LiveNode, resource: Resource): Pool[] {
  if (resource === "ram") return node.total_ram > 0 ? [pool("", node.total_ram, node.available_ram, 0)] : [];
  if (resource === "disk") return node.total_disk > 0 ? [pool("", node.total_disk, node.available_disk, 0)] : [];
  if (node.gpus.length > 0) return node.gpus.map((gpu) => pool(`GPU ${gpu.index}`, gpu.total_vram, gpu.free_vram, gpu.reserved_vram, gpu.utilization));
  return node.total_vram > 0 ? [vramOf(node, 0)] : [];
}

/** The VRAM that loads may use of a node, under its budget; `reserved`: on its GPUs. */
function vramOf(node: LiveNode, reserved: number): Pool {
  const limit = vramLimit(node);
  return pool("", limit, limit - usedVram(node), Math.max(node.reserved_vram, reserved));
}

/** All pools of a node together; one load can have at most the largest of them, unless it is split. */
export function wholeOf(node: LiveNode, pools: readonly Pool[]): Pool {
  const sum = (name: "total" | "used" | "reserved" | "free") => pools.reduce((bytes, item) => bytes + item[name], 0);
  const isLimited = node.vram_budget_bytes > 0 && pools.some(({ name }) => name !== "");
  if (isLimited) return vramOf(node, sum("reserved"));
  return { name: "", total: sum("total"), used: sum("used"), reserved: sum("reserved"), free: sum("free"), utilization: null };
}

export interface Place {
  node: LiveNode;
  pools: readonly Pool[];
  whole: Pool;
}

export interface Sums {
  nodes: number;
  total: number;
  used: number;
  reserved: number;
  free: number;
  /** The largest pool's free memory: what one load can have at most. */
  largest: number;
  largestAt: string;
}

/** Only a node in service has room for anything. */
export function isOpen(node: LiveNode): boolean {
  return node.status === "healthy" && node.node_type === "backend";
}

export function summed(places: readonly Place[]): Sums {
  const sums: Sums = { nodes: 0, total: 0, used: 0, reserved: 0, free: 0, largest: 0, largestAt: "" };
  for (const { node, pools, whole } of places) {
    if (!isOpen(node)) continue;
    sums.nodes += 1;
    sums.total += whole.total;
    sums.used += whole.used;
    sums.reserved += whole.reserved;
    sums.free += whole.free;
    for (const item of pools) {
      const free = Math.min(item.free, whole.free);
      if (free > sums.largest) {
        sums.largest = free;
        sums.largestAt = item.name === "" ? node.name : `${node.name}, ${item.name}`;
      }
    }
  }
  return sums;
}

export const ORDERS = ["name", "free"] as const;

/** The view in the address. */
export interface MapView {
  resource: Resource;
  /** "" for one group, "gpu", "state", or "label:zone". */
  group: string;
  order: (typeof ORDERS)[number];
  /** The model whose fit is shown; "" for none. */
  model: string;
}

export function parseView(query: URLSearchParams): MapView {
  const of = <Value extends string>(name: string, values: readonly Value[], usual: Value) => values.find((option) => option === query.get(name)) ?? usual;
  return { resource: of("of", RESOURCES, "vram"), group: query.get("group") ?? "", order: of("order", ORDERS, "name"), model: query.get("model") ?? "" };
}

export function addressOf({ resource, group, order, model }: MapView): URLSearchParams {
  const params = { of: resource === "vram" ? "" : resource, group, order: order === "name" ? "" : order, model };
  return new URLSearchParams(Object.entries(params).filter(([, value]) => value !== ""));
}

export interface Group {
  name: string;
  places: readonly Place[];
}

const collator = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });

function groupOf(node: LiveNode, group: string): string {
  if (group === "gpu") return gpuWords(node) || "no GPU";
  if (group === "state") return shownStatus(node);
  if (!group.startsWith("label:")) return "";
  const key = group.slice("label:".length);
  return Object.hasOwn(node.labels, key) ? `${key}=${node.labels[key] ?? ""}` : `no ${key}`;
}

/** The nodes that have any of it, in their groups. Agents run no models and have no place here. */
export function grouped(nodes: Iterable<LiveNode>, { resource, group, order }: Pick<MapView, "resource" | "group" | "order">): Group[] {
  const placesByGroup = new Map<string, Place[]>();
  for (const node of nodes) {
    if (node.node_type === "agent") continue;
    const pools = poolsOf(node, resource);
    if (pools.length === 0) continue;
    const place = { node, pools, whole: wholeOf(node, pools) };
    const name = groupOf(node, group);
    const groupPlaces = placesByGroup.get(name);
    if (groupPlaces === undefined) placesByGroup.set(name, [place]);
    else groupPlaces.push(place);
  }
  const byName = (left: Place, right: Place) => collator.compare(left.node.name, right.node.name);
  const freeOf = ({ node, whole }: Place) => (isOpen(node) ? whole.free : -1);
  const groups = [...placesByGroup].sort(([left], [right]) => collator.compare(left, right));
  return groups.map(([name, places]) => ({ name, places: places.sort((left, right) => (order === "free" ? freeOf(right) - freeOf(left) : 0) || byName(left, right)) }));
}

/** Keys of labels by which nodes can be grouped: those that do not differ on each node. */
export function groupKeys(nodes: Iterable<LiveNode>): string[] {
  const values = new Map<string, Set<string>>();
  let total = 0;
  for (const { labels } of nodes) {
    total += 1;
    for (const [key, value] of Object.entries(labels)) values.set(key, (values.get(key) ?? new Set()).add(value));
  }
  return [...values].filter(([key, seenValues]) => key !== "node.name" && (seenValues.size < total || total === 1)).map(([key]) => key).sort();
}
