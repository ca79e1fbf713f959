import { describe, expect, it } from "vitest";
import { node } from "../live/fixtures";
import type { Entry } from "./catalogue";
import { filterAddress, outdated, pendingOf, rowsOf, short, shownRows, tallies, target, parseFilter, type Installed, type UpgradeInfo, type InstalledFilter } from "./installed-model";

const NODES = new Map(["a", "b", "c"].map((name) => [name, node(name, name === "c" ? { status: "offline" } : {})]));
const NO_FILTER: InstalledFilter = { term: "", state: "all", variants: false, development: false };

function installed(Name: string, on: Record<string, { version?: string; digest?: string; from_address?: boolean }>, overrides: Partial<Installed> = {}): Installed {
  const nodes = Object.entries(on).map(([id, version]) => ({ node_id: id, node_name: id, node_status: "healthy" as const, ...version }));
  return { Name, RunFile: "", IsMeta: false, IsSystem: false, Metadata: { name: Name }, nodes, ...overrides };
}

function upgrade(version: string, overrides: Partial<UpgradeInfo> = {}): UpgradeInfo {
  return { backend_name: "", installed_version: "1", available_version: version, ...overrides };
}

function entry(name: string, metaBackendFor: string): Entry {
  return { name, metaBackendFor } as Entry;
}

const names = (rows: readonly { name: string }[]) => rows.map((row) => row.name);
const on = { a: { version: "2" }, b: { version: "2" }, c: { version: "1" } };

describe("rows of installed backends", () => {
  it("say what most nodes have and which differ; of as many the later one", () => {
    const [row] = rowsOf([installed("echo", on)], {}, [], NODES);
    expect([row?.version, row?.drifted]).toEqual(["2", 1]);
    expect(row?.places.map((place) => place.differs)).toEqual([false, false, true]);
    const [tie] = rowsOf([installed("echo", { a: { version: "1" }, b: { version: "2" } })], {}, [], NODES);
    expect(tie?.version).toBe("2");
  });

  it("have the live status of nodes, and no node that is gone", () => {
    const rows = rowsOf([installed("echo", { ...on, gone: {} }), installed("old", { gone: {} })], {}, [], NODES);
    expect(names(rows)).toEqual(["echo"]);
    expect(rows[0]?.places.map((place) => place.node.status)).toEqual(["healthy", "healthy", "offline"]);
  });

  it("system backends do not differ: no operator can make them the same", () => {
    expect(rowsOf([installed("sys", on, { IsSystem: true })], {}, [], NODES)[0]?.drifted).toBe(0);
  });
});

describe("which rows show", () => {
  const rows = rowsOf(
    [installed("llama", { a: {} }), installed("cpu-llama", { a: {} }), installed("lone-build", { b: {} }), installed("echo-development", { c: {} }), installed("sys", { a: {} }, { IsSystem: true })],
    { "lone-build": upgrade("2") },
    [entry("cpu-llama", "llama"), entry("lone-build", "not-there")],
    NODES,
  );

  it("builds of an installed backend and pre-releases only on demand (E51)", () => {
    expect(names(shownRows(rows, NO_FILTER))).toEqual(["lone-build", "llama", "sys"]);
    expect(names(shownRows(rows, { ...NO_FILTER, variants: true, development: true }))).toHaveLength(5);
  });

  it("by kind, update and absent nodes, each counted", () => {
    expect(tallies(rows)).toEqual({ all: 5, user: 4, system: 1, updates: 1, offline: 1 });
    expect(names(shownRows(rows, { ...NO_FILTER, state: "updates" }))).toEqual(["lone-build"]);
    expect(names(shownRows(rows, { ...NO_FILTER, state: "offline", development: true }))).toEqual(["echo-development"]);
    expect(names(shownRows(rows, { ...NO_FILTER, term: "LLA" }))).toEqual(["llama"]);
  });

  it("stands in the address, which brings it back (E46)", () => {
    const filter: InstalledFilter = { term: "ec ho", state: "offline", variants: true, development: true };
    expect(parseFilter(filterAddress(filter))).toEqual(filter);
    expect(filterAddress(NO_FILTER).toString()).toBe("view=installed");
    expect(parseFilter(new URLSearchParams("state=nonsense")).state).toBe("all");
  });
});

describe("an upgrade", () => {
  const row = (info: UpgradeInfo, where: Parameters<typeof installed>[1]) => rowsOf([installed("echo", where)], { echo: info }, [], NODES)[0];
  const entries = (info: UpgradeInfo, where: Parameters<typeof installed>[1]) => {
    const result = row(info, where);
    return result === undefined ? [] : outdated(result).map((node) => node.name);
  };

  it("is for the nodes without the version, else the digest, else those that differ", () => {
    expect(entries(upgrade("2"), on)).toEqual(["c"]);
    const digests = { a: { digest: "sha256:1" }, b: { digest: "sha256:2" }, c: { digest: "sha256:2" } };
    expect(entries(upgrade("", { available_digest: "sha256:2" }), digests)).toEqual(["a"]);
    expect(entries(upgrade(""), digests)).toEqual(["a"]);
  });

  it("is for all of them if it cannot be told which", () => {
    expect(entries(upgrade("2"), { a: { version: "2" }, b: { version: "2" } })).toEqual(["a", "b"]);
  });

  it("is never for a node that refuses it, because it has the backend from an address", () => {
    const mixed = { a: { from_address: true }, b: { version: "1" }, c: { version: "2" } };
    expect(entries(upgrade("2"), mixed)).toEqual(["b"]);
    expect(entries(upgrade("1"), { a: { from_address: true }, b: { version: "1" } })).toEqual(["b"]);
  });

  it("says what it brings (UI-0.19)", () => {
    expect([target(upgrade("v1.2")), target(upgrade("", { available_digest: `sha256:${"a".repeat(64)}` })), target(upgrade(""))]).toEqual(["v1.2", "sha256:aaaaaaaaaaaa", ""]);
    expect(short("x".repeat(50))).toHaveLength(20);
  });
});

it("pending work is counted once a node and command, and not before its wave opens (R1.110)", () => {
  const part = (node_id: string, status: string, wave?: number) => ({ node_id, node_name: node_id, status, percentage: 0, ...(wave === undefined ? {} : { wave }) });
  const work = (kind: string, nodes: object[], overrides: object = {}) => ({ kind, name: "echo", isBackend: true, status: "pending", nodes, ...overrides }) as never;
  const operations = [
    work("backend_delete", [part("a", "queued"), part("b", "success")]),
    work("backend_delete", [part("a", "queued")]),
    work("backend_upgrade", [part("a", "running_on_worker", 0), part("c", "queued", 1)], { waves: { open: 0 } }),
    work("backend_install", [part("d", "queued")], { name: "other" }),
    work("backend_install", [part("e", "error")], { status: "failed" }),
  ];
  expect(pendingOf(operations, "echo")).toEqual({ operations: 2, nodes: 1 });
});
