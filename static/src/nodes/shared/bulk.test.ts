import { describe, expect, it } from "vitest";
import { MOST_AT_ONCE, runAll, tally, type Outcome } from "./bulk";

const items = Array.from({ length: 20 }, (_, n) => ({ id: `n${n}` }));

function collected(): { seen: Map<string, Outcome>; tell: (id: string, outcome: Outcome) => void } {
  const seen = new Map<string, Outcome>();
  return { seen, tell: (id, outcome) => void seen.set(id, outcome) };
}

describe("a verb over many nodes", () => {
  it("asks at most six at once and every one just once", async () => {
    const { seen, tell } = collected();
    const asked: string[] = [];
    let under = 0;
    let most = 0;
    const work = async ({ id }: { id: string }) => {
      asked.push(id);
      most = Math.max(most, (under += 1));
      await Promise.resolve();
      under -= 1;
    };
    await runAll(items, work, tell, new AbortController().signal);
    expect([most, asked.length, new Set(asked).size, tally(seen, "done")]).toEqual([MOST_AT_ONCE, 20, 20, 20]);
  });

  it("goes on after a failure and keeps why", async () => {
    const { seen, tell } = collected();
    const work = ({ id }: { id: string }) => (id === "n3" ? Promise.reject(new Error("no")) : Promise.resolve());
    await runAll(items, work, tell, new AbortController().signal);
    expect([tally(seen, "done"), tally(seen, "failed"), seen.get("n3")?.error?.message]).toEqual([19, 1, "no"]);
  });

  it("keeps an answer that is shown once", async () => {
    const { seen, tell } = collected();
    await runAll(items.slice(0, 1), () => Promise.resolve("token"), tell, new AbortController().signal);
    expect(seen.get("n0")).toEqual({ state: "done", note: "token" });
  });

  it("leaves alone what was not sent when it is stopped", async () => {
    const { seen, tell } = collected();
    const control = new AbortController();
    const work = () => {
      control.abort();
      return Promise.resolve();
    };
    await runAll(items, work, tell, control.signal);
    expect(tally(seen, "done") + tally(seen, "stopped")).toBe(20);
    expect(tally(seen, "done")).toBeLessThanOrEqual(MOST_AT_ONCE);
  });
});
