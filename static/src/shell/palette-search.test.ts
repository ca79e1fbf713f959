import { describe, expect, it } from "vitest";
import type { components } from "../api/schema";
import type { LiveNode, Operation } from "../live/messages";
import { atFirst, backendEntries, chatEntries, find, index, modelEntries, nodeEntries, operationEntries, verbEntries, withVerbs, type Entry } from "./palette-search";

function node(name: string, overrides: Partial<LiveNode> = {}): LiveNode {
  const none = { status: "healthy", address: "", http_address: "", gpu_vendor: "", gpus: [], labels: {}, models: [], backends: [] };
  return { id: `id-${name}`, name, ...none, ...overrides } as unknown as LiveNode;
}

function model(model_name: string): LiveNode["models"][number] {
  return { model_name } as LiveNode["models"][number];
}

function titles(entries: Entry[], query: string): string[] {
  return [...find(index(entries), query, 8).values()].flat().map((entry) => entry.title);
}

describe("the search (UW37)", () => {
  const nodes = [
    node("gpu-10", { address: "10.0.0.7:9000", labels: { tier: "fast" } }),
    node("gpu-2", { models: [model("qwen"), model("qwen")], backends: ["llama-cpp"] }),
    node("my-gpu", { models: [model("qwen"), model("phi")] }),
    node("שרת", {}),
  ];

  it("finds nodes by name, address, label and GPU, the start of a name first and numbers in their order", () => {
    expect(titles(nodeEntries(nodes), "gpu")).toEqual(["gpu-2", "gpu-10", "my-gpu"]);
    expect(titles(nodeEntries(nodes), "10.0.0.7")).toEqual(["gpu-10"]);
    expect(titles(nodeEntries(nodes), "tier=fast")).toEqual(["gpu-10"]);
    expect(titles(nodeEntries(nodes), "שרת")).toEqual(["שרת"]);
    const gpus = [{ name: "NVIDIA L4" }] as LiveNode["gpus"];
    expect(titles(nodeEntries([...nodes, node("edge", { gpus })]), "l4")).toEqual(["edge"]);
  });

  it("wants every word, in any order", () => {
    expect(titles(nodeEntries(nodes), "healthy fast")).toEqual(["gpu-10"]);
    expect(titles(nodeEntries(nodes), "fast offline")).toEqual([]);
  });

  it("says on which nodes a model is and leads to its page", () => {
    const result = modelEntries(nodes, ["a/idle", "phi"]);
    expect(result.map(({ title, detail, to }) => [title, detail, to])).toEqual([
      ["a/idle", "not running", "/app/models/a%2Fidle"],
      ["phi", "on my-gpu", "/app/models/phi"],
      ["qwen", "on gpu-2, my-gpu", "/app/models/qwen"],
    ]);
  });

  it("knows installed backends and those of the catalogue, once", () => {
    const catalogue = [{ name: "llama-cpp", tags: ["text"] }, { name: "piper", tags: ["speech"] }];
    const result = backendEntries(nodes, catalogue as components["schemas"]["CatalogueEntry"][]);
    expect(result.map((entry) => [entry.title, entry.detail])).toEqual([
      ["llama-cpp", "on gpu-2"],
      ["piper", "in the catalogue"],
    ]);
    expect(titles(result, "speech")).toEqual(["piper"]);
  });

  it("puts failed operations before running ones and those before the ended", () => {
    const namedOperation = (name: string, status: Operation["status"], seq: number) =>
      ({ jobID: name, name, status, seq, kind: "installation", actor: "admin", message: "" }) as Operation;
    const entries = operationEntries([namedOperation("old", "completed", 9), namedOperation("runs", "processing", 3), namedOperation("bad", "failed", 1)]);
    expect(entries.map((entry) => entry.title)).toEqual(["bad", "runs", "old"]);
    expect(atFirst(entries, 2).get("Operations")?.map((entry) => entry.to)).toEqual(["/app/operations/bad", "/app/operations/runs"]);
  });

  it("names an operation as the other pages do, and finds it by the API's words too", () => {
    const load = { jobID: "1", name: "tiny", kind: "model_load", status: "processing", nodeName: "n1", actor: "ada", message: "" } as Operation;
    const entries = operationEntries([load, { ...load, jobID: "2", status: "waiting_for_nodes" }]);
    expect(entries.map(({ detail }) => detail)).toEqual(["Model load · running · n1", "Model load · waiting · n1"]);
    expect(titles(entries, "model_load processing")).toEqual(["tiny"]);
  });

  it("does not shift operations under the pointer while they move", () => {
    const datedOperation = (name: string, createdAt: string, seq: number) =>
      ({ jobID: name, name, status: "processing", seq, createdAt, kind: "installation", actor: "admin", message: "" }) as Operation;
    const titlesOf = (first: number, second: number) =>
      operationEntries([datedOperation("older", "2026-08-22T10:00:00Z", first), datedOperation("newer", "2026-08-22T10:00:01Z", second)]).map((entry) => entry.title);
    expect(titlesOf(7, 8)).toEqual(["newer", "older"]);
    expect(titlesOf(9, 8)).toEqual(["newer", "older"]);
  });

  it("answers no more of a kind than fit", () => {
    const many = Array.from({ length: 500 }, (_, number) => node(`node-${number}`));
    expect(titles(nodeEntries(many), "node")).toHaveLength(8);
  });
});

describe("verbs in the search (UW37)", () => {
  const nodes = [node("two", { drain: null }), node("gpu-two", { drain: null }), node("three", { drain: null, status: "offline" })];
  const backends = backendEntries(nodes, [{ name: "llama-cpp", tags: [] }] as unknown as components["schemas"]["CatalogueEntry"][]);
  const entryTitles = (query: string) => verbEntries(query, nodes, backends).map(({ title, to }) => [title, to]);

  it("lead to the question of what is named, and only where it makes sense", () => {
    expect(entryTitles("drain two")).toEqual([["Drain gpu-two…", "/app/nodes/id-gpu-two?do=drain"], ["Drain two…", "/app/nodes/id-two?do=drain"]]);
    expect(entryTitles("resu")).toEqual([["Resume three…", "/app/nodes/id-three?do=resume"]]);
    expect(entryTitles("approve two")).toEqual([]);
  });

  it("install by backend or on a node", () => {
    expect(entryTitles("install")).toEqual([["Install llama-cpp…", "/app/backends?install=llama-cpp"]]);
    expect(entryTitles("inst thr")).toEqual([["Install a backend on three…", "/app/nodes/id-three?do=install"]]);
  });

  it("lead to a talk with a model (UI-10.12)", () => {
    const talk = (query: string) => chatEntries(query, ["smollm2", "org/qwen"]).map(({ title, to }) => [title, to]);
    expect(talk("talk to smollm2")).toEqual([["Chat with smollm2", "/app/chat?model=smollm2"]]);
    expect(talk("chat with qw")).toEqual([["Chat with org/qwen", "/app/chat?model=org%2Fqwen"]]);
    expect(talk("chat")).toHaveLength(2);
    expect(talk("ta")).toEqual([]);
    expect(talk("drain smollm2")).toEqual([]);
  });

  it("come first once it is said to what: a verb alone may be the beginning of a name", () => {
    const order = (query: string) => [...withVerbs(query, verbEntries(query, nodes, backends), find(index(nodeEntries([node("drainer")])), query, 8), 8).keys()];
    expect(order("drain")).toEqual(["Nodes", "Actions"]);
    expect(order("drain two")).toEqual(["Actions"]);
    expect(order("dr")).toEqual(["Nodes"]);
  });
});
