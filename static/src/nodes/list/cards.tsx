// The same nodes on a phone: one card each, virtual as the rows of the table are, with the orders in a list.
import { memo, useRef, type ReactNode } from "react";
import { useNavigate } from "react-router";
import type { LiveNode } from "../../live/messages";
import { IconButton } from "../../ui/button";
import { Menu } from "../../ui/menu";
import { menuOf, type Action } from "./actions";
import { Address, Beat, Disk, Labels, Models, Name, Ram, State, Vram } from "./cells";
import { pressed, type Sort, type SortKey } from "./sort";
import { COLUMNS, SelectAll, type ListProps } from "./table";
import { useWindowRows } from "./use-window-rows";
import "./cards.css";

const CARD_HEIGHT = 220;

export function NodeCards({ nodes, sort, onSort, selection, onAct }: ListProps): ReactNode {
  const list = useRef<HTMLUListElement>(null);
  const rows = useWindowRows({ list, nodes, rowHeight: CARD_HEIGHT, pinnedRow: -1 });
  return (
    <div>
      <div className="card-head row">
        <SelectAll nodes={nodes} selection={selection} />
        <Order sort={sort} onSort={onSort} />
      </div>
      <ul ref={list} className="node-cards" aria-label="Nodes" style={{ height: rows.height }}>
        {rows.items.map((item) => {
          const node = nodes[item.index];
          if (node === undefined) return null;
          return (
            <li
              key={node.id}
              ref={rows.measure}
              data-index={item.index}
              className="node-card-place"
              aria-setsize={nodes.length}
              aria-posinset={item.index + 1}
              style={{ transform: `translateY(${item.start - rows.margin}px)` }}
            >
              <Card node={node} selected={selection.ids.has(node.id)} onToggle={selection.toggle} onAct={onAct} />
            </li>
          );
        })}
      </ul>
    </div>
  );
}

function Order({ sort, onSort }: { sort: Sort; onSort: (sort: Sort) => void }): ReactNode {
  return (
    <>
      <label className="row grow">
        <span>Sort by</span>
        <select
          className="input grow"
          value={sort.key}
          onChange={(event) => onSort(pressed({ ...sort, key: "name" }, event.target.value as SortKey))}
        >
          {COLUMNS.map((column) => (
            <option key={column.key} value={column.key}>
              {column.by ?? column.title.toLowerCase()}
            </option>
          ))}
        </select>
      </label>
      <IconButton
        name={sort.descending ? "Descending; reverse the order" : "Ascending; reverse the order"}
        glyph={sort.descending ? "↓" : "↑"}
        onClick={() => onSort({ ...sort, descending: !sort.descending })}
      />
    </>
  );
}

interface CardProps {
  node: LiveNode;
  selected: boolean;
  onToggle: (id: string) => void;
  onAct: (action: Action) => void;
}

const Card = memo(function Card({ node, selected, onToggle, onAct }: CardProps): ReactNode {
  const navigate = useNavigate();
  const open = () => void navigate(`/app/nodes/${node.id}`);
  return (
    <article className="node-card" data-id={node.id} data-selected={selected || undefined}>
      <div className="row">
        <input type="checkbox" aria-label={`Select ${node.name}`} checked={selected} onChange={() => onToggle(node.id)} />
        <div className="grow card-name">
          <Name node={node} />
        </div>
        <Menu name={`Actions for ${node.name}`} items={menuOf(node, onAct, open)} />
      </div>
      <div className="card-state">
        <State node={node} />
      </div>
      <dl className="card-facts">
        {PARTS.map(([title, Part]) => (
          <div key={title}>
            <dt>{title}</dt>
            <dd>
              <Part node={node} />
            </dd>
          </div>
        ))}
      </dl>
    </article>
  );
});

const PARTS: readonly (readonly [string, (props: { node: LiveNode }) => ReactNode])[] = [
  ["VRAM", Vram],
  ["RAM", Ram],
  ["Disk", Disk],
  ["Heartbeat", ({ node }) => <Beat at={node.last_heartbeat} />],
  ["Address", Address],
  ["Models", Models],
  ["Labels", Labels],
];
