import { describe, expect, it } from "vitest";
import { ago, bytes, count, duration, grouped, formatTimeLeft, rate } from "./format";

describe("formats of §2.0 (UI-0.16, UI-0.17)", () => {
  it.each([
    [0, "0 B"],
    [1023, "1023 B"],
    [1024, "1 KiB"],
    [5_046_586_573, "4.7 GiB"],
    [1024 ** 3 - 1, "1 GiB"],
    [-5, "0 B"],
    [Number.MAX_SAFE_INTEGER, "8 PiB"],
  ])("writes %d bytes as %s", (input, expected) => expect(bytes(input)).toBe(expected));

  it("writes a rate as bytes a second", () => expect(rate(5_046_586_573)).toBe("4.7 GiB/s"));

  it.each([
    [-3, "just now"],
    [12, "12s ago"],
    [200, "3m ago"],
    [5 * 3600, "5h ago"],
    [2 * 86400, "2d ago"],
  ])("writes an age of %d s as %s", (input, expected) => expect(ago(input)).toBe(expected));

  it.each([
    [0.2, "1s"],
    [45, "45s"],
    [700, "12 min"],
    [3899, "1h 5m"],
    [3599, "1h 0m"],
  ])("writes %d s left as %s", (input, expected) => expect(formatTimeLeft(input)).toBe(expected));

  it.each([
    [0, "< 1s"],
    [40, "40s"],
    [72, "1m 12s"],
    [-1, ""],
    [86_401, ""],
  ])("writes a duration of %d s as %s", (input, expected) => expect(duration(input)).toBe(expected));

  it("counts in words and groups fingerprints", () => {
    expect([count(1, "node"), count(13, "node"), count(2, "entry", "entries")]).toEqual([
      "1 node",
      "13 nodes",
      "2 entries",
    ]);
    expect(grouped("abcdef0123")).toBe("abcd ef01 23");
  });
});
