import { describe, expect, it } from "vitest";
import { model, node } from "../live/fixtures";
import type { LiveModel, Operation } from "../live/messages";
import { addressOf, backendOf, loadRefusal, modelRows, replicaWords, unloadRefusal, wantedIn, wantedRows, type Definition, type ModelRow } from "./rows";

function defined(name: string): Definition {
  return { id: name, backend: "echo", capabilities: [], disabled: false, pinned: false };
}

function operation(name: string, status: Operation["status"], more: Partial<Operation> = {}): Operation {
  return { jobID: `${name} ${status}`, kind: "model_load", fullName: name, name, status, seq: 1, ...more } as Operation;
}

const NODES = [
  node("n10", { models: [model("b", 1), model("b", 0, { state: "loading" })] }),
  node("n2", { models: [model("b", 0), model("stray", 0, { backend_type: "vllm" })] }),
];

function rows(...operations: Operation[]): ModelRow[] {
  return modelRows([defined("b"), defined("a")], NODES, operations);
}

function named(name: string, found: readonly ModelRow[]): ModelRow {
  const row = found.find((one) => one.name === name);
  if (row === undefined) throw new Error(`no row for ${name}`);
  return row;
}

describe("models (E65, UI-8.1)", () => {
  it("are all that is defined, runs or is worked on, by name, with replicas by node", () => {
    const found = rows(operation("gone", "failed"), operation("b", "processing"), operation("x", "completed"), operation("y", "processing", { kind: "backend_install" }));
    expect(found.map((row) => row.name)).toEqual(["a", "b", "gone", "stray"]);
    expect(named("b", found).places.map(({ node: { name }, model: { replica_index } }) => `${name}#${replica_index}`)).toEqual(["n2#0", "n10#0", "n10#1"]);
    expect([named("b", found).active.length, named("gone", found).failed.length]).toEqual([1, 1]);
    expect([backendOf(named("a", found)), backendOf(named("stray", found)), backendOf(named("gone", found))]).toEqual(["echo", "vllm", ""]);
  });

  it("count as replicas only when they are loaded (review R14)", () => {
    const words = (...states: LiveModel["state"][]) => replicaWords({ places: states.map((state, index) => ({ node: node("n"), model: model("m", index, { state }) })) });
    expect(words("loaded", "staging")).toEqual({ tone: "good", words: "1 replica" });
    expect([words("staging"), words("loading", "unloading")]).toEqual([{ tone: "info", words: "1 loading" }, { tone: "info", words: "1 loading" }]);
    expect([words("unloading"), words()]).toEqual([{ tone: "warn", words: "1 unloading" }, { tone: "", words: "not running" }]);
  });

  it("a dismissed failure is no longer shown", () => {
    expect(rows(operation("gone", "failed", { dismissedAt: "2026-08-22T10:00:00Z" })).map((row) => row.name)).not.toContain("gone");
  });

  it("are filtered by the address", () => {
    const wanted = wantedIn(new URLSearchParams("q=ECHO&show=running"));
    expect(wantedRows(rows(), wanted).map((row) => row.name)).toEqual(["b"]);
    expect(wantedRows(rows(), { term: "", shown: "idle" }).map((row) => row.name)).toEqual(["a"]);
    expect(addressOf(wanted).toString()).toBe("q=ECHO&show=running");
    expect(addressOf(wantedIn(new URLSearchParams("show=odd"))).toString()).toBe("");
  });

  it("are loaded and unloaded only where that means something", () => {
    const found = rows(operation("a", "processing"));
    expect([loadRefusal(named("a", found)), loadRefusal(named("b", found)), loadRefusal(named("stray", found))]).toEqual([
      "already being loaded", "already loaded; a rule asks for more replicas", "not defined on this server",
    ]);
    expect([loadRefusal(named("a", rows())), unloadRefusal(named("a", rows())), unloadRefusal(named("b", rows()))]).toEqual(["", "not loaded", ""]);
  });
});
