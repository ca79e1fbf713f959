// The view of installed backends: rows from the cluster's list, the upgrades, the catalogue and the live
// nodes; which of them show; and on which nodes an action is taken. Pure.
import type { components } from "../api/schema";
import { matchesWords } from "../lib/words";
import type { LiveNode, Operation } from "../live/messages";
import { isActive } from "../live/store";
import { onBackend } from "../nodes/detail/words";
import { ENDED, ownState } from "../operations/words";
import type { Entry } from "./catalogue";
import type { NodesById } from "./throttled-nodes";

type Schemas = components["schemas"];
export type Installed = Schemas["InstalledBackend"];
export type UpgradeInfo = Schemas["UpgradeInfo"];
type Where = Schemas["Where"];

/** A backend on a node, as its worker listed it; `differs` from what most nodes have. */
export interface Place {
  node: LiveNode;
  version: string;
  digest: string;
  installedAt: string;
  alias: string;
  /** Bytes of its files; 0 if the worker does not report it. */
  size: number;
  /** Installed by an address: its node refuses upgrades. */
  fromAddress: boolean;
  differs: boolean;
}

export interface Row {
  name: string;
  isSystem: boolean;
  /** Of most nodes. */
  version: string;
  digest: string;
  source: string;
  /** Installed from an address: no gallery has it. */
  byAddress: boolean;
  places: readonly Place[];
  drifted: number;
  upgrade: UpgradeInfo | null;
  /** A build of another installed backend, which chooses it. */
  isVariant: boolean;
  isDevelopment: boolean;
}

const DEVELOPMENT = "-development";
/** Why it can neither be upgraded nor be installed from a gallery again. */
export const FROM_ADDRESS = "Installed from an address. To update this backend, install it from that address again";

/** The address of the page of a backend. */
export function backendAddress(name: string): string {
  return `/app/backends/${encodeURIComponent(name)}`;
}

/** The rows by name; nodes that are gone are left out, and their status is the live one. */
export function rowsOf(
  installed: readonly Installed[],
  upgrades: Readonly<Record<string, UpgradeInfo>>,
  entries: readonly Entry[],
  nodes: NodesById,
): Row[] {
  const parents = new Map(entries.map((entry) => [entry.name.toLowerCase(), entry.metaBackendFor.toLowerCase()]));
  const installedNames = new Set(installed.map((backend) => backend.Name.toLowerCase()));
  return installed.flatMap((backend) => {
    const places = placesOf(backend, nodes);
    if (places.length === 0) return [];
    const usual = majority(places);
    const parent = parents.get(backend.Name.toLowerCase()) ?? "";
    return [
      {
        name: backend.Name,
        isSystem: backend.IsSystem,
        version: usual.version,
        digest: usual.digest,
        source: backend.Metadata?.uri ?? "",
        byAddress: backend.Metadata !== null && backend.Metadata.gallery_url === undefined,
        places: places.map((place) => ({ ...place, differs: !backend.IsSystem && !same(place, usual) })),
        drifted: backend.IsSystem ? 0 : places.filter((place) => !same(place, usual)).length,
        upgrade: upgrades[backend.Name] ?? null,
        isVariant: parent !== "" && installedNames.has(parent),
        isDevelopment: backend.Name.toLowerCase().endsWith(DEVELOPMENT),
      },
    ];
  });
}

type Build = Pick<Place, "version" | "digest">;

function same(left: Build, right: Build): boolean {
  return left.version === right.version && left.digest === right.digest;
}

function placesOf(backend: Installed, nodes: NodesById): Omit<Place, "differs">[] {
  return backend.nodes.flatMap((where: Where) => {
    const node = nodes.get(where.node_id);
    const { version = "", digest = "", installed_at: installedAt = "", alias = "", size = 0, from_address: fromAddress = false } = where;
    return node === undefined ? [] : [{ node, version, digest, installedAt, alias, size, fromAddress }];
  });
}

/** The build of most nodes; of equally many the one that sorts last, as on the server. */
function majority(places: readonly Build[]): Build {
  const counts = new Map<string, { build: Build; number: number }>();
  for (const { version, digest } of places) {
    const key = JSON.stringify([version, digest]);
    const buildCount = counts.get(key);
    counts.set(key, { build: { version, digest }, number: (buildCount?.number ?? 0) + 1 });
  }
  const order = [...counts.values()].sort(
    (left, right) => right.number - left.number || compare(right.build.version, left.build.version) || compare(right.build.digest, left.build.digest),
  );
  return order[0]?.build ?? { version: "", digest: "" };
}

function compare(left: string, right: string): number {
  return left === right ? 0 : left < right ? -1 : 1;
}

/** The work on a backend that has not ended, one for each node and command, and its nodes. */
export interface Pending {
  operations: number;
  nodes: number;
}

/** Counts as the server does: a part whose wave has not opened is no work yet. */
export function pendingOf(operations: readonly Operation[], name: string): Pending {
  const work = new Set<string>();
  const nodes = new Set<string>();
  for (const operation of operations.filter((candidate) => isActive(candidate) && onBackend(candidate, name))) {
    for (const operationTarget of operation.nodes ?? []) {
      if (ENDED.has(ownState(operationTarget)) || (operationTarget.wave ?? 0) > (operation.waves?.open ?? 0)) continue;
      work.add(`${operation.kind} ${operationTarget.node_id}`);
      nodes.add(operationTarget.node_id);
    }
  }
  return { operations: work.size, nodes: nodes.size };
}

export const STATES = ["all", "user", "system", "updates", "offline"] as const;
export type State = (typeof STATES)[number];

/** The filter of rows in the address. */
export interface InstalledFilter {
  term: string;
  state: State;
  variants: boolean;
  development: boolean;
}

export function parseFilter(query: URLSearchParams): InstalledFilter {
  const state = STATES.find((option) => option === query.get("state"));
  return {
    term: query.get("q") ?? "",
    state: state ?? "all",
    variants: query.get("show_all") === "1",
    development: query.get("development") === "1",
  };
}

export function filterAddress(filter: InstalledFilter): URLSearchParams {
  const query = new URLSearchParams({ view: "installed" });
  if (filter.term !== "") query.set("q", filter.term);
  if (filter.state !== "all") query.set("state", filter.state);
  if (filter.variants) query.set("show_all", "1");
  if (filter.development) query.set("development", "1");
  return query;
}

const IN_STATE: Readonly<Record<State, (row: Row) => boolean>> = {
  all: () => true,
  user: (row) => !row.isSystem,
  system: (row) => row.isSystem,
  updates: (row) => row.upgrade !== null,
  offline: (row) => row.places.some(({ node }) => isAway(node)),
};

/** True if it cannot run commands at present. */
export function isAway(node: LiveNode): boolean {
  return node.status !== "healthy" && node.status !== "draining";
}

/** Backends with an upgrade first, by name. */
export function shownRows(rows: readonly Row[], filter: InstalledFilter): Row[] {
  return rows
    .filter((row) => IN_STATE[filter.state](row) && (filter.variants || !row.isVariant) && (filter.development || !row.isDevelopment))
    .filter((row) => matchesWords(filter.term, row.name))
    .sort((left, right) => Number(right.upgrade !== null) - Number(left.upgrade !== null));
}

export function tallies(rows: readonly Row[]): Readonly<Record<State, number>> {
  const of = (state: State) => rows.filter(IN_STATE[state]).length;
  return { all: of("all"), user: of("user"), system: of("system"), updates: of("updates"), offline: of("offline") };
}

/** The nodes that an upgrade changes: those without the offered version or digest; without either, those that differ. */
export function outdated(row: Row): LiveNode[] {
  const { available_version: version = "", available_digest: digest = "" } = row.upgrade ?? {};
  const upgradable = row.places.filter((place) => !place.fromAddress);
  const old = upgradable.filter((place) => (version !== "" ? place.version !== version : digest !== "" ? place.digest !== digest : place.differs));
  // A node of another platform has a digest of its own: then no node is left out.
  return (old.length > 0 ? old : upgradable).map(({ node }) => node);
}

/** The result of an upgrade: `v1.2`, the beginning of a digest, or equal nodes. */
export function target(upgrade: UpgradeInfo): string {
  if (upgrade.available_version !== "") return versionText(upgrade.available_version);
  if (upgrade.available_digest !== undefined) return short(upgrade.available_digest);
  return "";
}

/** `v1.2.3`; "" without a version. */
export function versionText(version: string): string {
  return version === "" ? "" : `v${version.replace(/^v/, "")}`;
}

/** The beginning of a digest, enough to distinguish two. */
export function short(digest: string): string {
  const [algorithm = "", hex = ""] = digest.split(":");
  return hex === "" ? digest.slice(0, 20) : `${algorithm}:${hex.slice(0, 12)}`;
}
