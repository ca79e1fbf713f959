import { expect, it } from "vitest";
import { node } from "../live/fixtures";
import { listedRows, type Row } from "./picker-rows";

function row(name: string, status: Row["node"]["status"]): Row {
  return { node: node(name, { status }), expected: { kind: "install", text: "" }, progress: null, mine: false, operation: undefined, open: true };
}

it("a selected node that begins to drain stays in sight: nothing is installed on what is not shown", () => {
  const rows = [row("a", "draining"), row("b", "draining"), row("c", "healthy"), row("d", "pending")];
  const listed = (selected: string[], draining = false) => listedRows(rows, { requested: new Set(), selected: new Set(selected), draining });
  expect(listed(["a"]).map((row) => row.node.name)).toEqual(["a", "c"]);
  expect(listed([], true).map((row) => row.node.name)).toEqual(["a", "b", "c"]);
});
