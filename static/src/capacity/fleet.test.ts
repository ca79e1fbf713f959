import { describe, expect, it } from "vitest";
import { GIB, model, node } from "../live/fixtures";
import type { Gpu } from "../live/gpus";
import { gpuWords } from "../live/gpus";
import type { LiveNode } from "../live/messages";
import { verdicts, versionOf, type Fit } from "./fit";
import { addressOf, grouped, groupKeys, parseView, poolsOf, summed, wholeOf } from "./fleet";

function gpu(index: number, free: number, reserved = 0): Gpu {
  return { index, uuid: `GPU-${index}`, name: "NVIDIA L4", total_vram: 24 * GIB, free_vram: free * GIB, utilization: index === 0 ? 40 : null, reserved_vram: reserved * GIB };
}

const two = node("two", { total_vram: 48 * GIB, available_vram: 30 * GIB, gpu_vendor: "nvidia", labels: { zone: "west" }, ...({ gpus: [gpu(0, 10, 4), gpu(1, 20)] } as Partial<LiveNode>) });
const firstNode = node("one", { total_vram: 24 * GIB, available_vram: 8 * GIB, reserved_vram: 20 * GIB, vram_budget_bytes: 12 * GIB, gpu_vendor: "amd", labels: { zone: "east" } });
const offlineNode = node("gone", { status: "offline", total_vram: 80 * GIB, available_vram: 80 * GIB, labels: { zone: "west" } });
const cpu = node("cpu", { total_ram: 64 * GIB, available_ram: 60 * GIB, total_disk: 100 * GIB, available_disk: 40 * GIB });
const fleet = [two, firstNode, offlineNode, cpu, node("helper", { node_type: "agent", total_ram: GIB })];

describe("the map of capacity (UW8, UI-7.1)", () => {
  it("has a pool for each GPU, or one for a node that does not list them, under its budget", () => {
    expect(poolsOf(two, "vram").map(({ name, used, reserved, free }) => [name, used / GIB, reserved / GIB, free / GIB])).toEqual([["GPU 0", 14, 4, 6], ["GPU 1", 4, 0, 20]]);
    expect(poolsOf(firstNode, "vram").map(({ total, used, reserved, free }) => [total, used, reserved, free].map((size) => size / GIB))).toEqual([[12, 4, 8, 0]]);
    expect([poolsOf(cpu, "vram").length, poolsOf(cpu, "disk")[0]?.used]).toEqual([0, 60 * GIB]);
  });

  it("counts only what is in service, and knows the largest block that one load can have", () => {
    const [group] = grouped(fleet, { resource: "vram", group: "", order: "name" });
    expect(group?.places.map((place) => place.node.name)).toEqual(["gone", "one", "two"]);
    const sums = summed(group?.places ?? []);
    expect([sums.nodes, sums.total / GIB, sums.reserved / GIB, sums.free / GIB, sums.largest / GIB, sums.largestAt]).toEqual([2, 60, 12, 26, 20, "two, GPU 1"]);
  });

  it("has free what all its GPUs have free together (review R14)", () => {
    expect(wholeOf(two, poolsOf(two, "vram")).free / GIB).toBe(26);
  });

  it("has no more of a node's GPUs than its budget, and the largest block within it (UI-7.1)", () => {
    const limited = { ...two, vram_budget_bytes: 20 * GIB, available_vram: 16 * GIB };
    const [group] = grouped([limited], { resource: "vram", group: "", order: "name" });
    const sums = summed(group?.places ?? []);
    expect([sums.total, sums.used, sums.reserved, sums.free, sums.largest].map((size) => size / GIB)).toEqual([20, 4, 4, 12, 12]);
    expect(sums.largestAt).toBe("two, GPU 1");
  });

  it("groups by GPU, state or a label, and puts the freest first", () => {
    const names = (group: string) => grouped(fleet, { resource: "vram", group, order: "free" }).map(({ name, places }) => [name, ...places.map((place) => place.node.name)]);
    expect(names("gpu")).toEqual([["2 × NVIDIA L4", "two"], ["amd", "one"], ["no GPU", "gone"]]);
    expect(names("state")).toEqual([["healthy", "two", "one"], ["offline", "gone"]]);
    expect(names("label:zone")).toEqual([["zone=east", "one"], ["zone=west", "two", "gone"]]);
    expect(groupKeys(fleet)).toEqual(["zone"]);
    expect(gpuWords(firstNode)).toBe("amd");
  });

  it("is in the address", () => {
    const text = "of=ram&group=label%3Azone&order=free&model=org%2Fm";
    expect(addressOf(parseView(new URLSearchParams(text))).toString()).toBe(text);
    expect(addressOf(parseView(new URLSearchParams("of=odd&order=odd"))).toString()).toBe("");
  });
});

describe("the fit of a model (UI-7.3)", () => {
  it("has a word for each node", () => {
    const nodes = [{ node_id: "a", reason: "", enough_vram: true }, { node_id: "b", reason: "", enough_vram: false }, { node_id: "c", reason: "offline", enough_vram: true }];
    const verdictsByNode = verdicts({ model: "m", nodes } as unknown as Fit);
    expect([...(verdictsByNode ?? [])].map(([id, verdict]) => [id, verdict.mark, verdict.tone])).toEqual([["a", "fits", "good"], ["b", "tight", "warn"], ["c", "no", "bad"]]);
    expect(verdicts(undefined)).toBeNull();
  });

  it("is asked again when something placement looks at has changed, not with each heartbeat", () => {
    const previous = versionOf([firstNode]);
    expect(versionOf([{ ...firstNode, last_heartbeat: "2026-08-22T11:00:00Z", available_vram: firstNode.available_vram + 1 }])).toBe(previous);
    expect(versionOf([{ ...firstNode, models: [model("m", 0)] }])).not.toBe(previous);
    expect(versionOf([{ ...firstNode, available_vram: firstNode.available_vram + GIB }])).not.toBe(previous);
  });
});
