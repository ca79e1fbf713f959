import { describe, expect, it } from "vitest";
import { byJob, install } from "./fixtures";
import { pace, Paces, combine, UNKNOWN, type Sample } from "./pace";

function steady(seconds: number, perSecond: number): Sample[] {
  return Array.from({ length: seconds + 1 }, (_, n) => ({ at: 1000 * n, bytes: perSecond * n }));
}

describe("the rate", () => {
  it("needs two samples (UI-0.18)", () => {
    expect(pace([{ at: 0, bytes: 5 }], null, 100)).toBe(UNKNOWN);
    expect(pace(steady(1, 100), null, 1000).rate).toBe(100);
  });

  it("is of the last five seconds, and ends when nothing comes any more", () => {
    const slowThenFast = [{ at: 0, bytes: 0 }, { at: 6000, bytes: 10 }, { at: 7000, bytes: 1010 }];
    expect(pace(slowThenFast, null, 7000).rate).toBe(1000);
    expect(pace(steady(3, 100), null, 20_000)).toBe(UNKNOWN);
  });

  it("is none once everything has come (UI-0.18)", () => {
    expect(pace(steady(3, 100), 0, 3000)).toBe(UNKNOWN);
  });

  it("starts again when bytes go back, and is never negative (UI-0.18)", () => {
    const paces = new Paces();
    for (const [second, currentBytes] of [[0, 1000], [1, 2000], [2, 10], [3, 60]] as const) {
      paces.observe(byJob(install("a", { currentBytes })), 1000 * second);
    }
    expect(paces.of(install("a", { currentBytes: 60 }), 3000).rate).toBe(50);
  });

  it("takes an operation that has not changed for no sample", () => {
    const paces = new Paces();
    const same = byJob(install("a", { currentBytes: 10 }));
    paces.observe(same, 0);
    paces.observe(same, 1000);
    expect(paces.of(install("a"), 1000)).toBe(UNKNOWN);
  });
});

describe("the time left", () => {
  it("is known after three steady seconds with a known total", () => {
    expect(pace(steady(4, 100), 1000, 4000).secondsLeft).toBe(10);
    expect(pace(steady(2, 100), 1000, 2000).secondsLeft).toBeNull();
    expect(pace(steady(4, 100), null, 4000).secondsLeft).toBeNull();
  });

  it("is rather none than wrong when the rate jumps", () => {
    const jump = [{ at: 0, bytes: 0 }, { at: 2000, bytes: 10 }, { at: 4000, bytes: 5000 }];
    expect(pace(jump, 1000, 4000)).toMatchObject({ secondsLeft: null });
  });

  it("is the slowest's for a group, and none while one of it is not known", () => {
    expect(combine([{ rate: 10, secondsLeft: 5 }, { rate: 20, secondsLeft: 9 }])).toEqual({ rate: 30, secondsLeft: 9 });
    expect(combine([{ rate: 10, secondsLeft: 5 }, UNKNOWN])).toEqual({ rate: 10, secondsLeft: null });
  });
});
