// Every table of the pages. `Table` sizes its columns by their content and draws what it is given; `DataGrid` is for
// thousands of rows: virtual, scrolling with the page, opened and, with a selection, selected by keys. On a phone both show each row as a
// block of titled values. A row is drawn again when its object is another one.
import { defaultRangeExtractor, useWindowVirtualizer, type Range } from "@tanstack/react-virtual";
import { memo, useCallback, useLayoutEffect, useMemo, useRef, useState, type CSSProperties, type KeyboardEvent, type MouseEvent, type ReactNode, type RefObject } from "react";
import { PHONE, useMedia } from "../lib/media";
import { Button, IconButton } from "./button";
import { fitting, pressed, sorted, type Column, type Selection, type Sort } from "./rows";
import { Select, type Option } from "./select";
import { singleKeysWork, useShortcut } from "./shortcuts";
import "./table.css";

interface Shared<Row> {
  /** The name for assistive tech. */
  name: string;
  /** The first one names the row. Rows compare the columns: the same array keeps them from being drawn again. */
  columns: readonly Column<Row>[];
  rows: readonly Row[];
  rowId: (row: Row) => string;
  rowName: (row: Row) => string;
  selection?: Pick<Selection, "ids" | "toggle"> | undefined;
}

interface TableProps<Row> extends Shared<Row> {
  /** The number of rows before "Show more". */
  first?: number;
  /** False if the row cannot be selected now. */
  selectable?: (row: Row) => boolean;
  /** True if both look alike: by default if they are the same object. */
  alike?: (before: Row, after: Row) => boolean;
  className?: string;
}

export function Table<Row extends object>({ name, columns, rows, rowId, rowName, selection, first = Infinity, selectable = always, alike = Object.is, className = "" }: TableProps<Row>): ReactNode {
  const [limit, setLimit] = useState(first);
  const [sort, setSort] = useState<Sort | null>(null);
  const visible = sorted(rows, columns, sort, rowName, rowId).slice(0, limit);
  const open = selection === undefined ? [] : visible.filter(selectable).map(rowId);
  return (
    <>
      <table className={`table ${className}`} aria-label={name}>
        <thead>
          <Head columns={columns} sort={sort} onSort={setSort} check={selection && <SelectAll label="Select all visible" ids={open} selection={selection} />} />
        </thead>
        <tbody>
          {visible.map((row) => (
            <PlainRow
              key={rowId(row)}
              {...{ row, columns, alike }}
              id={rowId(row)}
              name={rowName(row)}
              toggle={selection?.toggle}
              selected={selection?.ids.has(rowId(row)) === true && selectable(row)}
              disabled={!selectable(row)}
            />
          ))}
        </tbody>
      </table>
      {rows.length > limit && (
        <div>
          <Button small onClick={() => setLimit(limit + Math.max(first, 100))}>
            Show {rows.length - limit} more
          </Button>
        </div>
      )}
    </>
  );
}

function always(): boolean {
  return true;
}

interface PlainRowProps<Row> {
  row: Row;
  columns: readonly Column<Row>[];
  alike: (before: Row, after: Row) => boolean;
  id: string;
  name: string;
  selected: boolean;
  disabled: boolean;
  toggle: Selection["toggle"] | undefined;
}

const PlainRow = memo(
  function PlainRow<Row>({ row, columns, id, name, selected, disabled, toggle }: PlainRowProps<Row>): ReactNode {
    return (
      <tr data-id={id} data-selected={selected || undefined}>
        {toggle !== undefined && (
          <td className="check">
            <input type="checkbox" aria-label={`Select ${name}`} checked={selected} disabled={disabled} onChange={() => toggle([id])} />
          </td>
        )}
        {columns.map(({ key, title, numeric, cell }, at) =>
          at === 0 ? (
            <th key={key} scope="row" className={key}>
              {cell(row)}
            </th>
          ) : (
            <td key={key} className={`${key} ${numeric ? "number" : ""}`} data-label={title}>
              {cell(row)}
            </td>
          ),
        )}
      </tr>
    );
  },
  (before, after) =>
    before.alike(before.row, after.row) && before.columns === after.columns && before.selected === after.selected && before.disabled === after.disabled && before.toggle === after.toggle,
) as <Row>(props: PlainRowProps<Row>) => ReactNode;

interface HeadProps<Row> {
  columns: readonly Column<Row>[];
  sort: Sort | null;
  onSort: (sort: Sort) => void;
  check?: ReactNode;
  hasMenu?: boolean;
}

function Head<Row>({ columns, sort, onSort, check, hasMenu = false }: HeadProps<Row>): ReactNode {
  return (
    <tr role="row">
      {check !== undefined && <td className="check">{check}</td>}
      {columns.map((column) => {
        const direction = sort?.key !== column.key ? "none" : sort.descending ? "descending" : "ascending";
        return (
          <th key={column.key} scope="col" role="columnheader" className={`${column.key} ${column.numeric ? "number" : ""}`} aria-sort={column.value && direction}>
            {column.value === undefined ? (
              column.title
            ) : (
              <button type="button" className="sort" title={`Sort by ${sortWords(column)}`} onClick={() => onSort(pressed(sort, column))}>
                {column.title}
                <span aria-hidden="true">{{ none: "", ascending: "↑", descending: "↓" }[direction]}</span>
              </button>
            )}
          </th>
        );
      })}
      {hasMenu && (
        <th scope="col" role="columnheader">
          <span className="visually-hidden">Actions</span>
        </th>
      )}
    </tr>
  );
}

function sortWords({ by, title }: Pick<Column<never>, "by" | "title">): string {
  return by ?? title.toLowerCase();
}

/** Selects all of these. */
function SelectAll({ label, ids, selection }: { label: string; ids: readonly string[]; selection: Pick<Selection, "ids" | "toggle"> }): ReactNode {
  const chosen = ids.filter((id) => selection.ids.has(id)).length;
  return (
    <input
      type="checkbox"
      aria-label={label}
      checked={chosen > 0 && chosen === ids.length}
      disabled={ids.length === 0}
      ref={(box) => {
        if (box !== null) box.indeterminate = chosen > 0 && chosen < ids.length;
      }}
      onChange={() => selection.toggle(ids)}
    />
  );
}

export interface DataGridProps<Row> extends Shared<Row> {
  /** Absent: rows cannot be selected. */
  selection?: Selection | undefined;
  sort: Sort;
  onSort: (sort: Sort) => void;
  /** One line in each row. */
  dense: boolean;
  /** Pixels of the window's top that something above the table covers. */
  covered: number;
  /** What a row is: the keys' descriptions say it. */
  noun: string;
  onOpen: (row: Row) => void;
  /** The last cell. Must stay the same function, as `onOpen` must: rows compare them. */
  menu: (row: Row) => ReactNode;
}

const ROW_HEIGHT = { dense: 26, roomy: 46, block: 240 };
/** The operations strip, which covers the bottom of the window while it is there. */
const STRIP_HEIGHT = 36;
/** The table's head, which stays in sight. */
const HEAD_HEIGHT = 30;
/** Widths of the box and the menu in rem. */
const ENDS: readonly number[] = [2, 2.25];

export function DataGrid<Row extends object>({ name, columns, rows, rowId, rowName, selection, sort, onSort, dense, covered, noun, onOpen, menu }: DataGridProps<Row>): ReactNode {
  const list = useRef<HTMLTableSectionElement>(null);
  const isPhone = useMedia(PHONE);
  const ends = selection === undefined ? ENDS.slice(1) : ENDS;
  const shown = useFitting(list, columns, isPhone, ends.reduce((sum, width) => sum + width, 0));
  const [active, setActive] = useState("");
  const index = rows.findIndex((row) => rowId(row) === active);
  const height = isPhone ? ROW_HEIGHT.block : dense ? ROW_HEIGHT.dense : ROW_HEIGHT.roomy;
  const virtual = useWindowRows(list, rows, rowId, height, index, covered + HEAD_HEIGHT);
  const move = (to: number) => {
    const next = rows[Math.min(Math.max(to, 0), rows.length - 1)];
    if (next === undefined) return;
    setActive(rowId(next));
    virtual.scrollToIndex(rows.indexOf(next), { align: "auto" });
    focusRow(list.current, rowId(next));
  };
  const pressKey = useRowKeys({ index, count: rows.length, noun, move, toggle: selection && (() => index >= 0 && selection.toggle([active])) });
  const items = virtual.getVirtualItems();
  const tracks = [...ends.slice(0, -1).map((width) => `${width}rem`), ...shown.map(({ width: [least, share] = [0, 1] }) => (share === 0 ? `${least}rem` : `minmax(${least}rem, ${share}fr)`)), `${ENDS[1]}rem`];
  const all = selection && <SelectAll label={`Select all ${rows.length} shown`} ids={rows.map(rowId)} selection={selection} />;
  return (
    <table className={`table data-grid ${dense && !isPhone ? "dense" : "roomy"} ${selection === undefined ? "plain" : ""}`} role="grid" aria-label={name} aria-multiselectable={selection && true} aria-rowcount={rows.length + 1} aria-colcount={shown.length + ends.length} onKeyDown={pressKey} style={{ "--columns": tracks.join(" ") } as CSSProperties}>
      <thead role="rowgroup">{isPhone ? <PhoneHead {...{ columns, sort, onSort }} check={all} /> : <Head columns={shown} {...{ sort, onSort }} check={all} hasMenu />}</thead>
      <tbody ref={list} role="rowgroup" style={{ height: virtual.getTotalSize() }}>
        {items.map((item) => {
          const row = rows[item.index];
          if (row === undefined) return null;
          return (
            <GridRow
              key={rowId(row)}
              {...{ row, onOpen, menu }}
              id={rowId(row)}
              name={rowName(row)}
              columns={shown}
              index={item.index}
              top={item.start - virtual.options.scrollMargin}
              selected={selection?.ids.has(rowId(row)) === true}
              tabbable={index < 0 ? item === items[0] : item.index === index}
              toggle={selection?.toggle}
              onActive={setActive}
              measure={isPhone ? virtual.measureElement : undefined}
            />
          );
        })}
      </tbody>
    </table>
  );
}

/** Order and selection where no headings are. */
function PhoneHead<Row>({ columns, sort, onSort, check }: HeadProps<Row> & { sort: Sort }): ReactNode {
  return (
    <tr role="row">
      <td className="row">
        {check}
        <Select
          label="Sort by"
          labelled="before"
          value={sort.key}
          options={columns.flatMap((column): Option[] => (column.value === undefined ? [] : [[column.key, sortWords(column)]]))}
          onChange={(key) => onSort(pressed(null, columns.find((column) => column.key === key) ?? sort))}
        />
        <IconButton
          name={sort.descending ? "Descending; reverse the order" : "Ascending; reverse the order"}
          glyph={sort.descending ? "↓" : "↑"}
          onClick={() => onSort({ ...sort, descending: !sort.descending })}
        />
      </td>
    </tr>
  );
}

interface GridRowProps<Row> extends Pick<DataGridProps<Row>, "columns" | "onOpen" | "menu"> {
  row: Row;
  id: string;
  name: string;
  index: number;
  top: number;
  selected: boolean;
  tabbable: boolean;
  toggle: Selection["toggle"] | undefined;
  onActive: (id: string) => void;
  measure: ((element: Element | null) => void) | undefined;
}

const GridRow = memo(function GridRow<Row>({ row, id, name, columns, index, top, selected, tabbable, toggle, onActive, onOpen, menu, measure }: GridRowProps<Row>): ReactNode {
  return (
    <tr
      ref={measure}
      role="row"
      data-id={id}
      data-index={index}
      aria-rowindex={index + 2}
      aria-selected={toggle && selected}
      tabIndex={tabbable ? 0 : -1}
      style={{ transform: `translateY(${top}px)` }}
      onFocus={() => onActive(id)}
      onClick={(event) => isOnRow(event) && onOpen(row)}
      onKeyDown={(event) => event.key === "Enter" && event.target === event.currentTarget && onOpen(row)}
    >
      {toggle !== undefined && (
        <td role="gridcell" className="check">
          <input type="checkbox" aria-label={`Select ${name}`} checked={selected} onChange={() => toggle([id])} />
        </td>
      )}
      {columns.map(({ key, title, numeric, cell }, at) => (
        <td key={key} role={at === 0 ? "rowheader" : "gridcell"} className={`cell ${key} ${numeric ? "number" : ""}`} data-label={title}>
          {cell(row)}
        </td>
      ))}
      <td role="gridcell" className="more">
        {menu(row)}
      </td>
    </tr>
  );
}) as <Row>(props: GridRowProps<Row>) => ReactNode;

/** A press on the row itself, not on what lies in it, and not the end of marking text. */
function isOnRow(event: MouseEvent): boolean {
  const target = event.target as Element;
  if (!event.currentTarget.contains(target) || target.closest("a, button, input, label") !== null) return false;
  return window.getSelection()?.toString() === "";
}

/** The row may not be in the document before the next frame. */
function focusRow(list: HTMLElement | null, id: string, tries = 5): void {
  const row = [...(list?.querySelectorAll("tr") ?? [])].find((element) => element.dataset["id"] === id);
  if (row) row.focus({ preventScroll: true });
  else if (tries > 0) requestAnimationFrame(() => focusRow(list, id, tries - 1));
}

interface Moves {
  index: number;
  count: number;
  noun: string;
  move: (to: number) => void;
  toggle: (() => void) | undefined;
}

const PAGE = 10;

/** The keys of the grid; the single letters work on the whole page as well. */
function useRowKeys({ index, count, noun, move, toggle }: Moves): (event: KeyboardEvent) => void {
  const letters: Readonly<Record<string, (() => void) | undefined>> = { j: () => move(index + 1), k: () => move(index < 0 ? 0 : index - 1), x: toggle };
  useShortcut("j", () => letters["j"]?.(), `Next ${noun}`);
  useShortcut("k", () => letters["k"]?.(), `Previous ${noun}`);
  useShortcut("x", () => toggle?.(), `Select the ${noun}`, toggle !== undefined);
  const keys: Readonly<Record<string, () => void>> = {
    ArrowDown: () => move(index + 1),
    ArrowUp: () => move(index - 1),
    PageDown: () => move(index + PAGE),
    PageUp: () => move(index - PAGE),
    Home: () => move(0),
    End: () => move(count - 1),
  };
  return (event) => {
    // Menus are drawn elsewhere in the document, but their events come here.
    const isInRow = event.target instanceof Element && event.target.closest(".data-grid tbody tr") !== null;
    if (event.ctrlKey || event.metaKey || event.altKey || !isInRow) return;
    const run = keys[event.key] ?? (singleKeysWork() ? letters[event.key] : undefined);
    if (run === undefined) return;
    event.preventDefault();
    run();
  };
}

/** Virtual rows that scroll with the page. `pinned` stays in the document, because the focus may be in it; -1 for none. */
function useWindowRows<Row>(list: RefObject<HTMLElement | null>, rows: readonly Row[], rowId: (row: Row) => string, height: number, pinned: number, covered: number) {
  const scrollMargin = useMeasured(list, (element) => Math.round(element.getBoundingClientRect().top + window.scrollY), document.body);
  const rangeExtractor = useCallback(
    (range: Range) => {
      const drawn = defaultRangeExtractor(range);
      if (pinned < 0 || pinned >= range.count || drawn.includes(pinned)) return drawn;
      return [...drawn, pinned].sort((left, right) => left - right);
    },
    [pinned],
  );
  const virtual = useWindowVirtualizer({
    count: rows.length,
    estimateSize: () => height,
    overscan: 6,
    scrollMargin,
    scrollPaddingStart: covered,
    scrollPaddingEnd: height + STRIP_HEIGHT,
    getItemKey: (index) => {
      const row = rows[index];
      return row === undefined ? index : rowId(row);
    },
    rangeExtractor,
    // Rows are drawn with the next frame; drawing them inside the scroll event makes React complain.
    useFlushSync: false,
  });
  useLayoutEffect(() => virtual.measure(), [virtual, height]);
  return virtual;
}

/** The columns that the table has the width for; a phone stacks all of them. */
function useFitting<Row>(list: RefObject<HTMLElement | null>, columns: readonly Column<Row>[], isPhone: boolean, ends: number): readonly Column<Row>[] {
  const width = useMeasured(list, (element) => element.offsetWidth / (parseFloat(getComputedStyle(document.documentElement).fontSize) || 16));
  return useMemo(() => (isPhone || width === 0 ? columns : fitting(columns, width - ends)), [columns, width, isPhone, ends]);
}

/** A measure of the element, taken again when `watched`, by default itself, changes its size. */
export function useMeasured(element: RefObject<HTMLElement | null>, measure: (element: HTMLElement) => number, watched?: HTMLElement): number {
  const [value, setValue] = useState(0);
  const latest = useRef(measure);
  useLayoutEffect(() => {
    const take = () => element.current !== null && setValue(latest.current(element.current));
    take();
    const observer = new ResizeObserver(take);
    const target = watched ?? element.current;
    if (target !== null) observer.observe(target);
    return () => observer.disconnect();
  }, [element, watched]);
  return value;
}
