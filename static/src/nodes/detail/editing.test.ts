import { describe, expect, it } from "vitest";
import { budgetProblem, capProblem, ceiling, decide, mostReplicas, overtaken, quotaProblem } from "./editing";

const GIB = 1024 ** 3;

describe("a field that is edited in place (2.4)", () => {
  it("only closes when nothing has changed", () => {
    expect(decide(" 80% ", "80%", budgetProblem)).toEqual({ kind: "close" });
  });

  it("keeps what cannot be saved, with the reason", () => {
    expect(decide("0", "1", capProblem)).toEqual({ kind: "refuse", why: "Enter a whole number from 1 to 10000." });
  });

  it("saves what is typed, without blanks around it", () => {
    expect(decide(" 3 ", "1", capProblem)).toEqual({ kind: "save", value: "3" });
  });

  it("lets an empty budget be saved: it means no cap", () => {
    expect(decide("", "80%", budgetProblem)).toEqual({ kind: "save", value: "" });
  });

  it("knows that somebody else was faster", () => {
    expect([overtaken("1", "3"), overtaken("1", "1")]).toEqual([true, false]);
  });
});

describe("replica caps (R1.45)", () => {
  it.each(["", "0", "-1", "1.5", "1e3", "10001", "two"])("refuses %j", (text) => {
    expect(capProblem(text)).not.toBe("");
  });

  it.each(["1", "10000"])("takes %j", (text) => {
    expect(capProblem(text)).toBe("");
  });

  it("is compared with the model that has most replicas", () => {
    const models = ["a", "b", "b"].map((model_name) => ({ model_name }));
    expect(mostReplicas(models)).toEqual({ model: "b", count: 2 });
    expect(mostReplicas([])).toBeNull();
  });
});

describe("VRAM budgets, as the server reads them (R1.49)", () => {
  it.each([
    ["50%", 12 * GIB],
    ["0.5", 12 * GIB],
    ["1", 24 * GIB],
    ["16GB", 16_000_000_000],
    ["15 GiB", 15 * GIB],
    ["1024", 1024],
    ["100 tib", 24 * GIB],
    ["", 0],
  ])("%j of 24 GiB is %d bytes", (text, limit) => {
    expect(ceiling(text, 24 * GIB)).toBe(limit);
  });

  it.each(["101%", "1.5", "lots", "12 XB", "-1", "x".repeat(33)])("refuses %j", (text) => {
    expect(budgetProblem(text)).not.toBe("");
  });
});

describe("disk quotas, as the server reads them (D-DISK-QUOTA)", () => {
  it.each(["200GB", "80%", "0.5", "1", ""])("takes %j", (text) => {
    expect(quotaProblem(text)).toBe("");
  });

  it.each(["0", "0%", "0GB", "101%", "1.5", "much", "9".repeat(33)])("refuses %j", (text) => {
    expect(quotaProblem(text)).not.toBe("");
  });
});
