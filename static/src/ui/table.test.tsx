import { cleanup, fireEvent, render, screen, within } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { fitting, useSelection, type Column } from "./rows";
import { DataGrid, Table } from "./table";

interface Row {
  id: string;
  size: number | null;
}

const ROWS: readonly Row[] = [
  { id: "b10", size: 2 },
  { id: "b9", size: null },
  { id: "a", size: 7 },
];
const COLUMNS: readonly Column<Row>[] = [
  { key: "name", title: "Name", width: [10, 1], value: ({ id }) => id, cell: ({ id }) => id },
  { key: "size", title: "Size", width: [5, 1], leaveOut: 2, largestFirst: true, value: ({ size }) => size, cell: ({ size }) => size ?? "–" },
  { key: "note", title: "Note", width: [5, 1], leaveOut: 1, cell: () => "text" },
];
const rowId = ({ id }: Row) => id;

beforeEach(() => {
  vi.stubGlobal("matchMedia", () => ({ matches: false, addEventListener: () => undefined, removeEventListener: () => undefined }));
  vi.stubGlobal("ResizeObserver", class { observe(): void {} unobserve(): void {} disconnect(): void {} });
  window.scrollTo = () => undefined;
});
afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

function names(): string[] {
  return screen.getAllByRole("rowheader").map((cell) => cell.textContent);
}

it("a heading sorts both ways, what has no value stays last, and says so to assistive tech (issue 24)", () => {
  render(<Table name="Things" columns={COLUMNS} rows={ROWS} rowId={rowId} rowName={rowId} />);
  expect(names()).toEqual(["b10", "b9", "a"]);
  const heading = screen.getByRole("columnheader", { name: /Size/ });
  fireEvent.click(within(heading).getByRole("button"));
  expect([names(), heading.getAttribute("aria-sort")]).toEqual([["a", "b10", "b9"], "descending"]);
  fireEvent.click(within(heading).getByRole("button"));
  expect([names(), heading.getAttribute("aria-sort")]).toEqual([["b10", "a", "b9"], "ascending"]);
  fireEvent.click(screen.getByRole("button", { name: "Name" }));
  expect(names()).toEqual(["a", "b9", "b10"]);
  expect(screen.queryByRole("button", { name: "Note" })).toBeNull();
});

it("shows the first rows, and the others on demand", () => {
  render(<Table name="Things" columns={COLUMNS} rows={ROWS} rowId={rowId} rowName={rowId} first={2} />);
  expect(names()).toEqual(["b10", "b9"]);
  fireEvent.click(screen.getByRole("button", { name: "Show 1 more" }));
  expect(names()).toEqual(["b10", "b9", "a"]);
});

it("leaves out columns, the least important first, until the others fit (review P8)", () => {
  const keys = (width: number) => fitting(COLUMNS, width).map(({ key }) => key);
  expect([keys(20), keys(19), keys(14), keys(3)]).toEqual([["name", "size", "note"], ["name", "note"], ["name"], ["name"]]);
});

function Selectable(): ReturnType<typeof Table> {
  const selection = useSelection();
  return <Table name="Things" columns={COLUMNS} rows={ROWS} rowId={rowId} rowName={rowId} selection={selection} selectable={({ size }) => size !== null} />;
}

it("selects one row or all that can be selected", () => {
  render(<Selectable />);
  const box = (name: string) => screen.getByRole<HTMLInputElement>("checkbox", { name });
  fireEvent.click(box("Select a"));
  expect([box("Select all visible").indeterminate, box("Select b9").disabled]).toEqual([true, true]);
  fireEvent.click(box("Select all visible"));
  expect([box("Select b10").checked, box("Select b9").checked, box("Select a").checked]).toEqual([true, false, true]);
  fireEvent.click(box("Select all visible"));
  expect(box("Select a").checked).toBe(false);
});

it("selects no rows that are not shown", () => {
  const toggle = vi.fn();
  const selection = { ids: new Set<string>(), toggle, clear: () => undefined };
  render(<Table name="Things" columns={COLUMNS} rows={ROWS} rowId={rowId} rowName={rowId} selection={selection} first={2} />);
  fireEvent.click(screen.getByRole("checkbox", { name: "Select all visible" }));
  expect(toggle).toHaveBeenCalledExactlyOnceWith(["b10", "b9"]);
});

const opened: string[] = [];
const open = ({ id }: Row) => opened.push(id);
const noMenu = () => null;

function Grid(): ReturnType<typeof DataGrid> {
  const selection = useSelection();
  return (
    <Tooltip.Provider>
      <DataGrid name="Things" noun="thing" columns={COLUMNS} rows={ROWS} rowId={rowId} rowName={rowId} selection={selection} sort={{ key: "name", descending: false }} onSort={() => undefined} dense covered={0} onOpen={open} menu={noMenu} />
    </Tooltip.Provider>
  );
}

it("the grid is walked, selected and opened by keys (UI-9.8, UI-3.11)", () => {
  render(<Grid />);
  const row = (at: number) => screen.getAllByRole("row")[at + 1] as HTMLElement;
  fireEvent.focus(row(0));
  fireEvent.keyDown(row(0), { key: "ArrowDown" });
  expect(document.activeElement).toBe(row(1));
  fireEvent.keyDown(row(1), { key: "x" });
  expect(row(1).getAttribute("aria-selected")).toBe("true");
  fireEvent.keyDown(row(1), { key: "End" });
  fireEvent.keyDown(row(2), { key: "Enter" });
  expect(opened).toEqual(["a"]);
  expect(screen.getByRole("grid").getAttribute("aria-rowcount")).toBe("4");
});
