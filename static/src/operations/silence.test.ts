import { expect, it } from "vitest";
import { install } from "./fixtures";
import { progressTimes, silence } from "./silence";

const NOW = Date.parse("2026-11-23T15:14:30Z");
const ago = (seconds: number) => new Date(NOW - 1000 * seconds).toISOString();
const clock = (iso: string) => new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" }).format(Date.parse(iso));

it("says for how long nothing was heard, and until when that may last (review R5)", () => {
  const limit = "2026-11-23T15:27:00Z";
  expect(silence({ lastProgressAt: ago(59), timeLimitAt: limit }, NOW)).toBe("");
  expect(silence({ lastProgressAt: ago(130), timeLimitAt: limit }, NOW)).toBe(`No update for 2 min, limit at ${clock(limit)}`);
  expect(silence({ lastProgressAt: ago(3_700) }, NOW)).toBe("No update for 1 h 1 min");
  expect(silence({ lastProgressAt: ago(130), timeLimitAt: ago(1) }, NOW)).toBe("No update for 2 min");
  expect(silence({}, NOW)).toBe("");
});

it("takes the latest news of several operations", () => {
  const of = (seconds: number) => install("a", { status: "processing", lastProgressAt: ago(seconds), timeLimitAt: ago(-seconds) });
  expect(progressTimes([of(300), of(100), of(200), install("b", { status: "pending" })])).toEqual({ lastProgressAt: ago(100), timeLimitAt: ago(-300) });
  expect(silence(progressTimes([install("b", { status: "processing" })]), NOW)).toBe("");
});
