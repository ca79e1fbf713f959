import { expect, it } from "vitest";
import { silentFor } from "./node-status";

const BEAT = Date.parse("2026-08-22T10:00:00Z");
const node = (status: "healthy" | "offline" | "draining", inventory_error = "") => ({ status, last_heartbeat: new Date(BEAT).toISOString(), inventory_error });

it.each([
  ["healthy", 10, 0],
  ["healthy", 24, 0],
  ["healthy", 31, 31],
  // The server has said so already.
  ["offline", 31, 0],
] as const)("doubts a node that is %s and was silent for %i s: %i", (status, seconds, doubt) => {
  expect(silentFor(node(status), BEAT + 1000 * seconds)).toBe(doubt);
});

it("has no doubt about a node that never sent a heartbeat", () => {
  expect(silentFor({ status: "healthy", last_heartbeat: null, inventory_error: "" }, BEAT)).toBe(0);
});

it("doubts sooner when the worker does not answer on the bus, and not while heartbeats come", () => {
  const mute = node("healthy", "the worker is not responding");
  expect([9, 13].map((seconds) => silentFor(mute, BEAT + 1000 * seconds))).toEqual([0, 13]);
});
