import { describe, expect, it } from "vitest";
import { NO_FILTERS, requestParams, filtersIn, pageOf, words } from "./changes-query";
import { addressOf, isNarrowed } from "./filters-address";

describe("the filters of Changes (UW32)", () => {
  it("are what the address says, and make the same address", () => {
    const address = "kind=node&actor=anna&subject=n1&from=2026-08-22T10%3A00%3A00.000Z";
    const filters = filtersIn(new URLSearchParams(address));
    expect(filters).toEqual({ ...NO_FILTERS, kind: "node", actor: "anna", subject: "n1", from: "2026-08-22T10:00:00.000Z" });
    expect(addressOf(filters).toString()).toBe(address);
  });

  it.each(["kind=wish", "from=yesterday", "other=1"])("leave out what cannot be meant: %s", (address) => {
    expect(isNarrowed(filtersIn(new URLSearchParams(address)))).toBe(false);
  });

  it("are asked for as they are, with the cursor of the page before", () => {
    expect(requestParams({ ...NO_FILTERS, kind: "operation" }, 0)).toEqual({ kind: "operation" });
    expect(requestParams(NO_FILTERS, 17)).toEqual({ cursor: 17 });
  });
});

describe("a change", () => {
  it.each([
    ["operation.cancelled_part", "cancelled on one node"],
    ["operation.history_cleared", "history cleared"],
    ["node.drained", "drained"],
  ])("reads as words: %s", (kind, text) => {
    expect(words({ kind })).toBe(text);
  });

  it.each([
    ["operation.asked", "o1", "/app/operations/o1"],
    ["node.drained", "n1", "/app/nodes/n1"],
    ["node.deregistered", "n1", ""],
    ["operation.history_cleared", "", ""],
    ["admin.changed", "7", ""],
  ])("leads to the page of what was changed: %s of %s", (kind, subject_id, page) => {
    expect(pageOf({ kind, subject_id })).toBe(page);
  });
});
