import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { fitOf } from "./fits";
import { answerBy, Refusal } from "./model-fixtures";

let batches: string[][];

beforeEach(() => {
  vi.useFakeTimers();
  batches = [];
});

afterEach(() => {
  vi.useRealTimers();
});

function answer(refuses = false): void {
  answerBy((_path, { body }) => {
    const { models } = body as { models: string[] };
    batches.push(models);
    return refuses ? new Refusal(503, "away") : { models: models.map((model) => ({ model, fitting: 1 })) };
  });
}

it("asks for the models of one moment together, at most 100 at once (UW9)", async () => {
  answer();
  const asked = ["m0", ...Array.from({ length: 101 }, (_, index) => `m${index}`)].map(fitOf);
  await vi.runAllTimersAsync();
  expect((await Promise.all(asked)).map(({ model }) => model).slice(0, 3)).toEqual(["m0", "m0", "m1"]);
  expect(batches.map(({ length }) => length)).toEqual([100, 1]);
  const later = fitOf("m0");
  await vi.runAllTimersAsync();
  await later;
  expect(batches).toHaveLength(3);
});

it("says to all rows that the server refuses", async () => {
  answer(true);
  const asked = Promise.allSettled([fitOf("a"), fitOf("b")]);
  await vi.runAllTimersAsync();
  expect((await asked).map(({ status }) => status)).toEqual(["rejected", "rejected"]);
});
