import { describe, expect, it } from "vitest";
import { MAX_SAMPLES, range, sampled, withSample, type Sample } from "./samples";

const node = {
  status: "healthy",
  total_vram: 24,
  available_vram: 10,
  vram_budget_bytes: 0,
  total_ram: 64,
  available_ram: 60,
};

describe("memory since the page was opened", () => {
  it("keeps a bounded number of samples, the newest ones", () => {
    let ring: readonly Sample[] = [];
    for (let at = 0; at < MAX_SAMPLES + 10; at += 1) ring = withSample(ring, { at, vram: at, ram: null });
    expect([ring.length, ring[0]?.at, ring.at(-1)?.at]).toEqual([MAX_SAMPLES, 10, MAX_SAMPLES + 9]);
  });

  it("samples what is in use", () => {
    expect(sampled(node, true, 5000)).toEqual({ at: 5, vram: 14, ram: 4 });
  });

  it("counts VRAM within the budget: no more than that is ever told free", () => {
    expect(sampled({ ...node, vram_budget_bytes: 12 }, true, 0).vram).toBe(2);
  });

  it("leaves a gap while nothing is known", () => {
    const gap = { at: 0, vram: null, ram: null };
    expect(sampled(node, false, 0)).toEqual(gap);
    expect(sampled({ ...node, status: "offline" }, true, 0)).toEqual(gap);
    expect(sampled(undefined, true, 0)).toEqual(gap);
    expect(sampled({ ...node, total_vram: 0 }, true, 0).vram).toBeNull();
  });

  it("tells the range of what is known", () => {
    expect(range([null, 3, 1])).toEqual({ low: 1, high: 3 });
    expect(range([null])).toBeNull();
  });
});
