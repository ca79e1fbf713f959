import { describe, expect, it } from "vitest";
import { model, node } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { COLUMNS } from "./columns";
import { definition } from "./model-fixtures";
import { addressOf, backendOf, deleteRefusal, filterRows, isIdle, loadRefusal, modelAddress, modelRows, parseFilter, stateOf, unloadRefusal, type Facts, type ModelRow } from "./rows";

const DEFINED = [definition("b", { backend: "echo" }), definition("a", { backend: "echo" })];

function operation(name: string, status: Operation["status"], overrides: Partial<Operation> = {}): Operation {
  return { jobID: `${name} ${status}`, kind: "model_load", fullName: name, name, status, seq: 1, ...overrides } as Operation;
}

const NODES = [
  node("n10", { models: [model("b", 1), model("b", 0, { state: "loading" })] }),
  node("n2", { models: [model("b", 0), model("stray", 0, { backend_type: "vllm" })] }),
];

function facts(...operations: Operation[]): Facts {
  return { definitions: DEFINED, nodes: NODES, operations, rules: [], rates: new Map() };
}

function rows(...operations: Operation[]): ModelRow[] {
  return modelRows(facts(...operations));
}

function named(name: string, allRows: readonly ModelRow[]): ModelRow {
  const row = allRows.find((modelRow) => modelRow.name === name);
  if (row === undefined) throw new Error(`no row for ${name}`);
  return row;
}

describe("models (E65, UI-8.1)", () => {
  it("are all that is defined, runs or is worked on, by name, with replicas by node", () => {
    const result = rows(operation("gone", "failed"), operation("b", "processing"), operation("x", "completed"), operation("y", "processing", { kind: "backend_install" }));
    expect(result.map((row) => row.name)).toEqual(["a", "b", "gone", "stray"]);
    expect(named("b", result).places.map(({ node: { name }, model: { replica_index } }) => `${name}#${replica_index}`)).toEqual(["n2#0", "n10#0", "n10#1"]);
    expect([named("b", result).active.length, named("gone", result).failed.length]).toEqual([1, 1]);
    expect([backendOf(named("a", result)), backendOf(named("stray", result)), backendOf(named("gone", result))]).toEqual(["echo", "vllm", ""]);
  });

  it("a dismissed failure is no longer shown", () => {
    expect(rows(operation("gone", "failed", { dismissedAt: "2026-08-22T10:00:00Z" })).map((row) => row.name)).not.toContain("gone");
  });

  it("are filtered by the address", () => {
    const filter = parseFilter(new URLSearchParams("q=ECHO&show=running&sort=-size"), COLUMNS);
    expect(filterRows(rows(), filter).map((row) => row.name)).toEqual(["b"]);
    expect(filterRows(rows(), { term: "", shown: "idle" }).map((row) => row.name)).toEqual(["a"]);
    expect(addressOf(filter).toString()).toBe("q=ECHO&show=running&sort=-size");
    expect(addressOf(parseFilter(new URLSearchParams("show=odd&sort=odd"), COLUMNS)).toString()).toBe("");
  });

  it("are loaded, unloaded and deleted only where that means something", () => {
    const result = rows(operation("a", "processing"));
    expect([loadRefusal(named("a", result)), loadRefusal(named("stray", result)), loadRefusal({ definition: definition("x", { state: "disabled" }) })]).toEqual(["", "not defined on this server", "disabled"]);
    expect([isIdle(named("a", result)), isIdle(named("a", rows())), isIdle(named("b", rows()))]).toEqual([false, true, false]);
    expect([unloadRefusal(named("a", rows())), unloadRefusal(named("b", rows()))]).toEqual(["not loaded", ""]);
    expect([deleteRefusal(named("a", rows())), deleteRefusal({ definition: definition("x", { origin: "file" }), active: [] })]).toEqual(["", "defined by a file in the models folder; remove the file"]);
  });

  it("have one state, of which those that need attention come first", () => {
    const result = rows(operation("a", "failed"), operation("gone", "processing"));
    expect([stateOf(named("a", result)), stateOf(named("b", result)), stateOf(named("gone", result)), stateOf(named("a", rows()))]).toEqual(["failed", "loaded", "loading", "idle"]);
  });

  it("stay the same objects while nothing of them changes: thousands are not drawn again", () => {
    const work = operation("a", "processing");
    const before = modelRows(facts(work));
    expect(modelRows(facts(work), before)).toEqual(before);
    const after = modelRows({ ...facts({ ...work, progress: 9 }), rates: new Map([["b", 2]]) }, before);
    expect(after.map((row, index) => row === before[index])).toEqual([false, false, true]);
  });

  it("have an address, also one that is called as a page is", () => {
    expect([modelAddress("org/x"), modelAddress("add"), modelAddress("x", "files")]).toEqual(["/app/models/org%2Fx", "/app/models/add/overview", "/app/models/x/files"]);
  });
});
