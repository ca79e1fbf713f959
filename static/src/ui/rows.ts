// The rows of a table: order, columns that fit, selection, export. Pure but for the selection's state.
import { useCallback, useState, type ReactNode } from "react";

export interface Column<Row> {
  key: string;
  title: string;
  cell: (row: Row) => ReactNode;
  /** The value that the column sorts by and exports; null comes last. Absent: the column does neither. */
  value?: (row: Row) => string | number | null;
  /** The words for the order, if the title does not say it. */
  by?: string;
  /** The first press on the heading sorts the largest to the top. */
  largestFirst?: boolean;
  numeric?: boolean;
  /** Least width in rem, and the share of the rest; absent: sized by its content. */
  width?: readonly [least: number, share: number];
  /** Narrow tables leave out the highest number first; absent: never. */
  leaveOut?: number;
  /** Not shown unless it is chosen. */
  extra?: boolean;
}

export interface Sort {
  key: string;
  descending: boolean;
}

/** Reads `vram` or, for descending, `-vram`; null if there is no such column. */
export function readSort(text: string | null, columns: readonly Column<never>[]): Sort | null {
  const key = text?.replace(/^-/, "");
  return columns.some((column) => column.key === key && column.value !== undefined) ? { key: key ?? "", descending: text?.startsWith("-") ?? false } : null;
}

export function writeSort({ key, descending }: Sort): string {
  return descending ? `-${key}` : key;
}

/** The order after the heading of `column` is pressed. */
export function pressed(sort: Sort | null, column: Pick<Column<never>, "key" | "largestFirst">): Sort {
  return { key: column.key, descending: sort?.key === column.key ? !sort.descending : (column.largestFirst ?? false) };
}

const collator = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });

function compare(left: string | number, right: string | number): number {
  return typeof left === "number" && typeof right === "number" ? left - right : collator.compare(String(left), String(right));
}

/** The rows in this order: empty values last in both directions, equal ones by `name`, then by `id`. */
export function sorted<Row extends object>(rows: readonly Row[], columns: readonly Column<Row>[], sort: Sort | null, name: (row: Row) => string, id: (row: Row) => string): readonly Row[] {
  const value = columns.find(({ key }) => key === sort?.key)?.value;
  if (sort === null || value === undefined) return rows;
  const keyed = rows.map((row) => ({ row, value: value(row) }));
  keyed.sort((left, right) => {
    const missing = Number(left.value === null) - Number(right.value === null);
    const order = left.value === null || right.value === null ? 0 : compare(left.value, right.value);
    return missing || (sort.descending ? -order : order) || collator.compare(name(left.row), name(right.row)) || (id(left.row) < id(right.row) ? -1 : 1);
  });
  return keyed.map(({ row }) => row);
}

/** The columns that fit side by side into so many rem. */
export function fitting<Row>(columns: readonly Column<Row>[], available: number): readonly Column<Row>[] {
  let shown = columns;
  const optional = columns.filter(({ leaveOut }) => leaveOut !== undefined).sort((left, right) => (right.leaveOut ?? 0) - (left.leaveOut ?? 0));
  for (const column of optional) {
    if (shown.reduce((sum, { width = [0] }) => sum + width[0], 0) <= available) break;
    shown = shown.filter((kept) => kept !== column);
  }
  return shown;
}

/** All columns with values as CSV. A text that a spreadsheet would run as a formula gets a leading apostrophe. */
export function csv<Row>(columns: readonly Column<Row>[], rows: readonly Row[]): string {
  const field = (value: string | number | null) => {
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const valued = columns.filter((column) => column.value !== undefined);
  return [valued.map(({ title }) => field(title)), ...rows.map((row) => valued.map(({ value }) => field(value?.(row) ?? null)))].map((line) => `${line.join(",")}\r\n`).join("");
}

export interface Selection {
  ids: ReadonlySet<string>;
  /** Selects all of these, or none of them if all are. */
  toggle: (ids: readonly string[]) => void;
  clear: () => void;
}

/** Selected rows by id; the selection survives filtering and sorting. */
export function useSelection(first: readonly string[] = []): Selection {
  const [ids, setIds] = useState<ReadonlySet<string>>(() => new Set(first));
  const toggle = useCallback((toggled: readonly string[]) => setIds((previous) => toggledIn(previous, toggled)), []);
  const clear = useCallback(() => setIds(new Set()), []);
  return { ids, toggle, clear };
}

function toggledIn(ids: ReadonlySet<string>, toggled: readonly string[]): ReadonlySet<string> {
  if (!toggled.every((id) => ids.has(id))) return new Set([...ids, ...toggled]);
  const remaining = new Set(ids);
  for (const id of toggled) remaining.delete(id);
  return remaining;
}
