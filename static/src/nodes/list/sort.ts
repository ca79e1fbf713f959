// The order of the nodes. What a node does not have comes last in both directions; equal ones stay by name. Pure.
import type { LiveNode } from "../../live/messages";
import { shownStatus, type ShownStatus } from "../shared/node-status";

export const SORT_KEYS = ["state", "name", "address", "vram", "ram", "disk", "models", "beat", "labels"] as const;
export type SortKey = (typeof SORT_KEYS)[number];

export interface Sort {
  key: SortKey;
  descending: boolean;
}

export const DEFAULT_SORT: Sort = { key: "state", descending: false };

/** Reads `vram` or, for descending, `-vram`; anything else is the usual order. */
export function readSort(text: string | null): Sort {
  const descending = text?.startsWith("-") ?? false;
  const key = SORT_KEYS.find((sortKey) => sortKey === (descending ? text?.slice(1) : text));
  return key === undefined ? DEFAULT_SORT : { key, descending };
}

export function writeSort({ key, descending }: Sort): string {
  return descending ? `-${key}` : key;
}

/** The order after its heading is pressed: figures start with the largest, text with A. */
export function pressed(sort: Sort, key: SortKey): Sort {
  if (sort.key === key) return { key, descending: !sort.descending };
  return { key, descending: key === "vram" || key === "ram" || key === "disk" || key === "models" };
}

const collator = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });

const SEVERITY: Readonly<Record<ShownStatus, number>> = { pending: 0, offline: 2, unhealthy: 3, draining: 4, healthy: 5, rejected: 6 };
/** Somebody else claims to be the node: only an approval comes before that. */
const CLAIMED = 1;

const VALUES: Readonly<Record<SortKey, (node: LiveNode) => string | number | null>> = {
  state: (node) => (node.open_conflicts > 0 ? Math.min(CLAIMED, SEVERITY[node.status]) : SEVERITY[shownStatus(node)]),
  name: (node) => node.name,
  address: (node) => node.address || null,
  vram: (node) => (node.total_vram > 0 ? node.available_vram : null),
  ram: (node) => (node.total_ram > 0 ? node.available_ram : null),
  disk: (node) => (node.total_disk > 0 ? node.available_disk : null),
  models: (node) => (node.node_type === "agent" ? null : node.model_count + node.in_flight_count / 1e6),
  // The age of the last beat: ascending is the latest first.
  beat: (node) => (node.last_heartbeat === null ? null : -Date.parse(node.last_heartbeat)),
  labels: (node) => Object.entries(node.labels).map(([key, value]) => `${key}=${value}`).join(" ") || null,
};

/** The nodes in this order; the given array stays as it is. */
export function sorted(nodes: readonly LiveNode[], { key, descending }: Sort): LiveNode[] {
  const value = VALUES[key];
  const keyed = nodes.map((node) => ({ node, value: value(node) }));
  keyed.sort((left, right) => {
    if (left.value === null || right.value === null) {
      const missing = Number(left.value === null) - Number(right.value === null);
      return missing || byName(left.node, right.node);
    }
    const order = compare(left.value, right.value);
    return (descending ? -order : order) || byName(left.node, right.node);
  });
  return keyed.map(({ node }) => node);
}

function compare(left: string | number, right: string | number): number {
  if (typeof left === "number" && typeof right === "number") return left - right;
  return collator.compare(String(left), String(right));
}

function byName(left: LiveNode, right: LiveNode): number {
  return collator.compare(left.name, right.name) || (left.id < right.id ? -1 : 1);
}
