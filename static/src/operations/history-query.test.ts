import { describe, expect, it } from "vitest";
import { took } from "./history-details";
import { NO_FILTERS, requestParams, exportOf, filtersIn, spans } from "./history-query";
import { addressOf, isNarrowed } from "./filters-address";

const NODE = "0190c2f4-9d2e-7c11-8a52-3f1b1c9f0a11";

describe("the filters of History (UW29)", () => {
  it("are what the address says, and make the same address", () => {
    const address = `node=${NODE}&backend=llama-cpp&kind=backend_upgrade&outcome=failed&actor=anna&from=2026-08-22T10%3A00%3A00.000Z`;
    const filters = filtersIn(new URLSearchParams(address));
    expect(filters).toEqual({ ...NO_FILTERS, node: NODE, backend: "llama-cpp", kind: "backend_upgrade", outcome: "failed", actor: "anna", from: "2026-08-22T10:00:00.000Z" });
    expect(addressOf(filters).toString()).toBe(address);
  });

  it.each(["node=me", "kind=wish", "outcome=maybe", "from=yesterday", "to=%00", "other=1"])("leave out what cannot be meant: %s", (address) => {
    expect(isNarrowed(filtersIn(new URLSearchParams(address)))).toBe(false);
  });

  it("are asked for as they are, with the cursor of the page before", () => {
    expect(requestParams({ ...NO_FILTERS, actor: "anna" }, "")).toEqual({ actor: "anna" });
    expect(requestParams({ ...NO_FILTERS, actor: "anna" }, "c1")).toEqual({ actor: "anna", cursor: "c1" });
  });

  it("are those of the export", () => {
    expect(exportOf(NO_FILTERS, "csv")).toBe("/api/operations/history/export?format=csv");
    expect(exportOf({ ...NO_FILTERS, actor: "anna & co" }, "ndjson")).toBe("/api/operations/history/export?format=ndjson&actor=anna+%26+co");
  });
});

describe("the time line of a part", () => {
  it("is when it waited and when it ran, of the whole operation", () => {
    const target = { startedAt: new Date(2000).toISOString(), finishedAt: new Date(8000).toISOString() };
    expect(spans(target, 0, 10_000)).toEqual({ waited: { from: 0, to: 0.2 }, ran: { from: 0.2, to: 0.8 } });
  });

  it("of one that never began is a wait to its end", () => {
    expect(spans({ finishedAt: new Date(5000).toISOString() }, 0, 10_000)).toEqual({ waited: { from: 0, to: 0.5 }, ran: { from: 0.5, to: 0.5 } });
  });

  it("stays within its bounds when clocks disagree", () => {
    expect(spans({ startedAt: new Date(99_000).toISOString(), finishedAt: "never" }, 10_000, 10_000)).toEqual({ waited: { from: 0, to: 1 }, ran: { from: 1, to: 1 } });
  });

  it("in words leaves out what is not known", () => {
    const created = new Date(0).toISOString();
    expect(took({ startedAt: new Date(3000).toISOString(), finishedAt: new Date(43_000).toISOString() }, created)).toBe("waited 3s, ran 40s");
    expect(took({ finishedAt: new Date(4000).toISOString() }, created)).toBe("waited 4s");
    expect(took({}, created)).toBe("");
  });
});
