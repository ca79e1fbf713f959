import { describe, expect, it } from "vitest";
import type { LiveNode } from "../../live/messages";
import { find, isFiltering, NOTHING_CHOSEN, readFilter, toggled, withView, writeFilter, type Filter } from "./filter";
import { matches, parse } from "./query";
import { csv, pressed, readSort, sorted, type Sort } from "../../ui/rows";
import { COLUMNS, DEFAULT_SORT, EXPORTED } from "./columns";

const GIB = 1024 ** 3;

function node(name: string, overrides: Partial<LiveNode> = {}): LiveNode {
  const empty = { open_conflicts: 0, rejected: null, labels: {}, models: [], backends: [], gpu_vendor: "", node_type: "backend", address: "", source_address: "", gpus: [] };
  return { id: name, name, status: "healthy", total_vram: 0, available_vram: 0, ...empty, ...overrides } as unknown as LiveNode;
}

function model(name: string, backend = "llama-cpp") {
  return { id: name, model_name: name, backend_type: backend, in_flight: 0, vram_needed: 0, state: "loaded", phase: "serving", replica_index: 0, last_used: "", created_at: "" } as const;
}

const gpu = (index: number, name: string) => ({ index, uuid: "", name, total_vram: 80 * GIB, free_vram: 0, reserved_vram: 0, utilization: null });
const west = node("gpu-1", {
  status: "offline",
  gpu_vendor: "nvidia",
  address: "10.0.0.1:50051",
  labels: { zone: "west", "node.name": "gpu-1" },
  models: [model("all-MiniLM")],
  gpus: [gpu(0, "Nvidia h100 80GB HBM3"), gpu(1, "Nvidia h100 80GB HBM3")],
});
const east = node("gpu-2", { gpu_vendor: "amd", labels: { zone: "east" }, backends: ["whisper"] });
const agent = node("helper", { node_type: "agent", labels: { zone: "west" } });
const allNodes = [west, east, agent];

function named(query: string): string[] {
  return allNodes.filter((node) => matches(parse(query), node)).map((node) => node.name);
}

describe("the box (UW3, UI-3.19)", () => {
  it.each([
    ["", ["gpu-1", "gpu-2", "helper"]],
    ["GPU", ["gpu-1", "gpu-2"]],
    ["minilm", ["gpu-1"]],
    ["10.0.0.1:50051", ["gpu-1"]],
    ["west", ["gpu-1", "helper"]],
    ["status:offline", ["gpu-1"]],
    ["state:off", ["gpu-1"]],
    ["status:offline status:healthy gpu", ["gpu-1", "gpu-2"]],
    ["gpu:nvidia", ["gpu-1"]],
    ["gpu:none", ["helper"]],
    ["h100", ["gpu-1"]],
    ["gpu:h100", ["gpu-1"]],
    ["nvidia", ["gpu-1"]],
    ["-h100", ["gpu-2", "helper"]],
    ["zone=west", ["gpu-1", "helper"]],
    ["zone=", ["gpu-1", "gpu-2", "helper"]],
    ["zone=west zone=east type:backend", ["gpu-1", "gpu-2"]],
    ["zone=we", []],
    ['model:"all-mini"', ["gpu-1"]],
    ["model:", ["gpu-1", "gpu-2", "helper"]],
    ["backend:whisper", ["gpu-2"]],
    ["backend:llama", ["gpu-1"]],
    ["type:agent", ["helper"]],
    ['"', ["gpu-1", "gpu-2", "helper"]],
    ["unknown:thing", []],
    ["offline", ["gpu-1"]],
    ["zone=west healthy", ["helper"]],
    ["-zone=west", ["gpu-2"]],
    ["-type:agent -offline", ["gpu-2"]],
    ["-", ["gpu-1", "gpu-2"]],
  ])("%s shows %j", (query, expected) => expect(named(query)).toEqual(expected));

  it.each([
    ["zone=west 1", ["wide"]],
    ["zone=West 1 wide", ["wide"]],
    ["zone=west 10", ["gpu-1"]],
    ['zone="west 1"', ["wide"]],
    ["-zone=west 1", ["gpu-1", "gpu-2", "helper"]],
  ])("%s finds a label value with a blank", (query, expected) => {
    const nodes = [...allNodes, node("wide", { labels: { zone: "west 1" } })];
    expect(find(nodes, filter({}, query)).nodes.map((node) => node.name)).toEqual(expected);
  });

  it.each([
    ["status:bogus", "There is no state “bogus”"],
    ["-type:gpu", "There is no type “gpu”"],
    ["tier:slow", "There is no field “tier”"],
    ["constructor:x", "There is no field “constructor”"],
    ["__proto__:x", "There is no field “__proto__”"],
    ["gpu-1:50051 10.0.0.1:9 fd00::1 model:x tier=slow", ""],
  ])("%s says %s", (query, message) => {
    const { problems } = parse(query);
    expect(problems.join(" ")).toContain(message);
    expect(problems.length).toBe(message === "" ? 0 : 1);
    expect(() => named(query)).not.toThrow();
  });
});

function filter(overrides: Partial<Filter["chosen"]>, q = ""): Filter {
  return { ...readFilter(new URLSearchParams()), q, chosen: { ...NOTHING_CHOSEN, ...overrides } };
}

describe("facets", () => {
  it("count what one more value would show: all other conditions hold", () => {
    const { nodes, counts } = find(allNodes, filter({ label: ["zone=west"], state: ["offline"] }));
    expect(nodes.map((node) => node.name)).toEqual(["gpu-1"]);
    expect(Object.fromEntries(counts.state)).toEqual({ offline: 1, healthy: 1 });
    expect(Object.fromEntries(counts.label)).toEqual({ "zone=west": 1 });
    expect(Object.fromEntries(counts.gpu)).toEqual({ nvidia: 1, "Nvidia h100 80GB HBM3": 1 });
  });

  it("count nothing that the text hides", () => {
    expect(Object.fromEntries(find(allNodes, filter({}, "helper")).counts.type)).toEqual({ agent: 1 });
  });

  it("take two values of one key as either, two keys as both", () => {
    const both = node("both", { labels: { zone: "west", tier: "fast" } });
    const names = (label: string[]) => find([...allNodes, both], filter({ label })).nodes.map((node) => node.name);
    expect(names(["zone=west", "zone=east"])).toEqual(["gpu-1", "gpu-2", "helper", "both"]);
    expect(names(["zone=west", "tier=fast"])).toEqual(["both"]);
  });
});

describe("the address", () => {
  it.each(["", "q=zone%3Dwest&state=offline%2Chealthy&gpu=none&gpu=NVIDIA+L4&label=a%3Db%2Cc&label=d&sort=-vram&columns=name%2Cstate%2Cversion&rows=roomy"])("%s reads back the same", (text) => {
    expect(writeFilter(readFilter(new URLSearchParams(text))).toString()).toBe(text);
  });

  it("ignores what it does not know and says nothing of what is usual", () => {
    const read = readFilter(new URLSearchParams("sort=nonsense&state=,,&x=1"));
    expect([read.sort, isFiltering(read), writeFilter(read).toString()]).toEqual([DEFAULT_SORT, false, ""]);
  });

  it("keeps columns and row height, and this browser remembers them", () => {
    const view = withView(filter({}), { columns: ["name", "busy"], dense: false });
    expect(writeFilter(view).toString()).toBe("columns=name%2Cbusy&rows=roomy");
    expect(readFilter(new URLSearchParams())).toMatchObject({ columns: ["name", "busy"], dense: false });
    expect(readFilter(new URLSearchParams("columns=name,gpu&rows=dense"))).toMatchObject({ columns: ["name", "gpu"], dense: true });
    window.localStorage.clear();
  });

  it("keeps the name as the only column", () => {
    const only = readFilter(new URLSearchParams("columns=name"));
    expect(only.columns).toEqual(["name"]);
    expect(readFilter(writeFilter(only)).columns).toEqual(["name"]);
    expect(readFilter(new URLSearchParams("columns=")).columns).toContain("state");
  });

  it("turns a value on and off", () => {
    const on = toggled(filter({}), "state", "offline");
    expect([on.chosen.state, toggled(on, "state", "offline").chosen.state]).toEqual([["offline"], []]);
  });
});

const inOrder = (nodes: readonly LiveNode[], sort: Sort | null) => sorted(nodes, COLUMNS, sort, ({ name }) => name, ({ id }) => id).map((node) => node.name);
const key = (name: string) => COLUMNS.find((column) => column.key === name) ?? { key: name };

it("the export has names, states and bytes, and no text that a spreadsheet runs", () => {
  const lines = csv(EXPORTED, [node("=cmd()", { total_vram: 24 * GIB, available_vram: 20 * GIB, labels: { note: 'a "b", c' } })]).split("\r\n");
  expect(lines[0]).toContain("VRAM free bytes,VRAM bytes");
  expect(lines[1]).toMatch(/^'=cmd\(\),healthy,/);
  expect(lines[1]).toContain(`${20 * GIB},${24 * GIB}`);
  expect(lines[1]).toContain('"note=a ""b"", c"');
});

it("the export gives the reason that the State cell shows", () => {
  const reasonColumn = EXPORTED.find(({ title }) => title === "Reason");
  expect(reasonColumn?.value?.(node("a", { status: "pending", reason: "waits for approval", rejected: { at: "", by: "admin", reason: "not ours" } }))).toBe("rejected: not ours");
  expect(reasonColumn?.value?.(node("b", { reason: "silent" }))).toBe("silent");
});

describe("the order", () => {
  const small = node("b10", { total_vram: 8 * GIB, available_vram: 8 * GIB });
  const large = node("b9", { total_vram: 24 * GIB, available_vram: 20 * GIB });

  it("is by name as people count", () => {
    expect(inOrder([small, large, agent], readSort("name", COLUMNS))).toEqual(["b9", "b10", "helper"]);
  });

  it.each([
    ["-vram", ["b9", "b10", "helper"]],
    ["vram", ["b10", "b9", "helper"]],
  ])("%s keeps what has none last", (text, expected) => {
    expect(inOrder([agent, small, large], readSort(text, COLUMNS))).toEqual(expected);
  });

  it("starts with what needs an eye (UI-3.18), and with the largest figures", () => {
    const rejected = node("refused", { status: "pending", rejected: { at: "", by: "", reason: "" } });
    const claimed = node("claimed", { open_conflicts: 1 });
    expect(inOrder([...allNodes, rejected, claimed, node("new", { status: "pending" })], DEFAULT_SORT)).toEqual(["new", "claimed", "gpu-1", "gpu-2", "helper", "refused"]);
    expect(pressed(DEFAULT_SORT, key("vram"))).toEqual({ key: "vram", descending: true });
    expect(pressed({ key: "vram", descending: true }, key("vram")).descending).toBe(false);
  });
});
