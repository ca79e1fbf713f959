// The table: a grid of virtual rows that scrolls with the page. The focus is on rows (arrow keys, j and k, Enter,
// x); everything inside of a row is reached by Tab. A row is drawn again when its node is another object.
import { memo, useRef, useState, type KeyboardEvent, type MouseEvent, type ReactNode } from "react";
import { useNavigate } from "react-router";
import type { LiveNode } from "../../live/messages";
import { Menu } from "../../ui/menu";
import { singleKeysWork, useShortcut } from "../../ui/shortcuts";
import { menuOf, type Action } from "./actions";
import { Address, Beat, Disk, Labels, Models, Name, Ram, State, Vram } from "./cells";
import type { Selection } from "./use-selection";
import { pressed, type Sort, type SortKey } from "./sort";
import { useWindowRows } from "./use-window-rows";

export const ROW_HEIGHT = 46;

interface Column {
  key: SortKey;
  title: string;
  /** The sort key, if the title does not name it. */
  by?: string;
  cell: (props: { node: LiveNode }) => ReactNode;
}

export const COLUMNS: readonly Column[] = [
  { key: "state", title: "State", by: "needs attention first", cell: State },
  { key: "name", title: "Name", cell: Name },
  { key: "address", title: "Address", cell: Address },
  { key: "vram", title: "VRAM", by: "free VRAM", cell: Vram },
  { key: "ram", title: "RAM", by: "free RAM", cell: Ram },
  { key: "disk", title: "Disk", by: "free disk", cell: Disk },
  { key: "models", title: "Models", by: "loaded models", cell: Models },
  { key: "beat", title: "Heartbeat", by: "age of the last heartbeat", cell: ({ node }) => <Beat at={node.last_heartbeat} /> },
  { key: "labels", title: "Labels", cell: Labels },
];

const COLUMN_COUNT = COLUMNS.length + 2;

export interface ListProps {
  nodes: readonly LiveNode[];
  sort: Sort;
  onSort: (sort: Sort) => void;
  selection: Selection;
  /** Pixels of the window's top that the tools above the list cover. */
  covered: number;
  /** Must stay the same function: rows compare it. */
  onAct: (action: Action) => void;
}

/** The bar on top of every page, and the head of the table. */
const TOP = 48 + 34;

export function NodesTable({ nodes, sort, onSort, selection, covered, onAct }: ListProps): ReactNode {
  const list = useRef<HTMLDivElement>(null);
  const [active, setActive] = useState("");
  const index = nodes.findIndex((node) => node.id === active);
  const rows = useWindowRows({ list, nodes, rowHeight: ROW_HEIGHT, pinnedRow: index, covered: covered + TOP });
  const move = (to: number) => {
    const next = nodes[Math.min(Math.max(to, 0), nodes.length - 1)];
    if (next === undefined) return;
    setActive(next.id);
    rows.reveal(nodes.indexOf(next));
    focusRow(list.current, next.id);
  };
  const pressKey = useRowKeys({ index, count: nodes.length, move, toggle: () => index >= 0 && selection.toggle(active) });
  const first = rows.items[0]?.index ?? 0;
  return (
    <div
      className="nodes-grid"
      role="grid"
      aria-label="Nodes"
      aria-multiselectable
      aria-rowcount={nodes.length + 1}
      aria-colcount={COLUMN_COUNT}
      onKeyDown={pressKey}
    >
      <Header nodes={nodes} sort={sort} onSort={onSort} selection={selection} />
      <div ref={list} role="rowgroup" className="nodes-rows" style={{ height: rows.height }}>
        {rows.items.map((item) => {
          const node = nodes[item.index];
          if (node === undefined) return null;
          const tabbable = index < 0 ? item.index === first : item.index === index;
          return (
            <Row
              key={node.id}
              node={node}
              index={item.index}
              top={item.start - rows.margin}
              selected={selection.ids.has(node.id)}
              tabbable={tabbable}
              onToggle={selection.toggle}
              onActive={setActive}
              onAct={onAct}
            />
          );
        })}
      </div>
    </div>
  );
}

/** The row may not be in the document before the next frame. */
function focusRow(list: HTMLElement | null, id: string, tries = 5): void {
  const row = list?.querySelector<HTMLElement>(`[data-id="${CSS.escape(id)}"]`);
  if (row) row.focus({ preventScroll: true });
  else if (tries > 0) requestAnimationFrame(() => focusRow(list, id, tries - 1));
}

interface Moves {
  index: number;
  count: number;
  move: (to: number) => void;
  toggle: () => void;
}

const PAGE = 10;

/** The keys of the grid; the single letters work on the whole page as well. */
function useRowKeys({ index, count, move, toggle }: Moves): (event: KeyboardEvent) => void {
  useShortcut("j", () => move(index + 1), "Next node");
  useShortcut("k", () => move(index < 0 ? 0 : index - 1), "Previous node");
  useShortcut("x", toggle, "Select the node");
  const keys: Readonly<Record<string, () => void>> = {
    ArrowDown: () => move(index + 1),
    ArrowUp: () => move(index - 1),
    PageDown: () => move(index + PAGE),
    PageUp: () => move(index - PAGE),
    Home: () => move(0),
    End: () => move(count - 1),
  };
  const letters: Readonly<Record<string, () => void>> = { j: () => move(index + 1), k: () => move(index - 1), x: toggle };
  return (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || outsideOfRows(event.target)) return;
    const run = keys[event.key] ?? (singleKeysWork() ? letters[event.key] : undefined);
    if (run === undefined) return;
    event.preventDefault();
    run();
  };
}

/** Menus are drawn elsewhere in the document, but their events come here. */
function outsideOfRows(target: EventTarget): boolean {
  return !(target instanceof Element) || target.closest(".node-row") === null;
}

interface HeaderProps extends Pick<ListProps, "nodes" | "sort" | "onSort"> {
  selection: Selection;
}

function Header({ nodes, sort, onSort, selection }: HeaderProps): ReactNode {
  return (
    <div role="rowgroup" className="nodes-head">
      <div role="row" aria-rowindex={1} className="grid-row">
        <div role="columnheader" aria-colindex={1} className="cell check">
          <SelectAll nodes={nodes} selection={selection} />
        </div>
        {COLUMNS.map((column, at) => (
          <div
            key={column.key}
            role="columnheader"
            aria-colindex={at + 2}
            className={`cell ${column.key}`}
            aria-sort={sort.key !== column.key ? "none" : sort.descending ? "descending" : "ascending"}
          >
            <button
              type="button"
              className="sort"
              title={`Sort by ${column.by ?? column.title.toLowerCase()}`}
              onClick={() => onSort(pressed(sort, column.key))}
            >
              {column.title}
              <span className="sort-mark" aria-hidden="true">
                {sort.key !== column.key ? "" : sort.descending ? "↓" : "↑"}
              </span>
            </button>
          </div>
        ))}
        <div role="columnheader" aria-colindex={COLUMN_COUNT} className="cell more">
          <span className="visually-hidden">Actions</span>
        </div>
      </div>
    </div>
  );
}

/** Selects everything that the filter shows. */
export function SelectAll({ nodes, selection }: { nodes: readonly LiveNode[]; selection: Selection }): ReactNode {
  const chosen = nodes.filter((node) => selection.ids.has(node.id)).length;
  const isAllChosen = chosen === nodes.length && chosen > 0;
  return (
    <input
      type="checkbox"
      aria-label={`Select all ${nodes.length} shown`}
      checked={isAllChosen}
      ref={(box) => {
        if (box !== null) box.indeterminate = chosen > 0 && !isAllChosen;
      }}
      onChange={() => selection.toggleAll(nodes)}
    />
  );
}

interface RowProps {
  node: LiveNode;
  index: number;
  top: number;
  selected: boolean;
  tabbable: boolean;
  onToggle: (id: string) => void;
  onActive: (id: string) => void;
  onAct: (action: Action) => void;
}

const Row = memo(function Row({ node, index, top, selected, tabbable, onToggle, onActive, onAct }: RowProps): ReactNode {
  const navigate = useNavigate();
  const open = () => void navigate(`/app/nodes/${node.id}`);
  return (
    <div
      role="row"
      className="grid-row node-row"
      data-id={node.id}
      aria-rowindex={index + 2}
      aria-selected={selected}
      tabIndex={tabbable ? 0 : -1}
      style={{ transform: `translateY(${top}px)` }}
      onFocus={() => onActive(node.id)}
      onClick={(event) => isOnRow(event) && open()}
      onKeyDown={(event) => event.key === "Enter" && event.target === event.currentTarget && open()}
    >
      <div role="gridcell" aria-colindex={1} className="cell check">
        <input type="checkbox" aria-label={`Select ${node.name}`} checked={selected} onChange={() => onToggle(node.id)} />
      </div>
      {COLUMNS.map(({ key, cell: Cell }, at) => (
        <div key={key} role="gridcell" aria-colindex={at + 2} className={`cell ${key}`}>
          <Cell node={node} />
        </div>
      ))}
      <div role="gridcell" aria-colindex={COLUMN_COUNT} className="cell more">
        <Menu name={`Actions for ${node.name}`} items={menuOf(node, onAct, open)} />
      </div>
    </div>
  );
});

/** A press on the row itself, not on what lies in it, and not the end of marking text. */
export function isOnRow(event: MouseEvent): boolean {
  const target = event.target as Element;
  if (!event.currentTarget.contains(target) || target.closest("a, button, input, label") !== null) return false;
  return window.getSelection()?.toString() === "";
}
