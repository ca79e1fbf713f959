// The map: a cell for each node, in groups, with a bar for each pool of its memory. One cell takes Tab; the arrows go on
// from there. A cell is drawn again when its node or its verdict is another one; cells out of sight are not laid out.
import { memo, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count } from "../lib/format";
import { fillOf } from "../ui/bars";
import { shownStatus } from "../nodes/shared/node-status";
import type { Verdict } from "./fit";
import { isOpen, summed, type Group, type Place, type Pool } from "./fleet";

interface MapProps {
  groups: readonly Group[];
  /** Null while no model is chosen. */
  verdicts: ReadonlyMap<string, Verdict> | null;
}

export function FleetMap({ groups, verdicts }: MapProps): ReactNode {
  const place = useRef<HTMLDivElement>(null);
  const [active, setActive] = useState("");
  const ids = groups.flatMap(({ places }) => places.map(({ node }) => node.id));
  const tabbable = ids.includes(active) ? active : ids[0];
  const press = (event: KeyboardEvent) => {
    const to = step(place.current, event);
    if (to === null) return;
    event.preventDefault();
    to.focus();
  };
  return (
    <div ref={place} className="cap-map" onKeyDown={press}>
      {groups.map((group) => (
        <section key={group.name} aria-label={group.name === "" ? "All nodes" : group.name}>
          {group.name !== "" && <GroupHead group={group} />}
          <ul className="cap-cells">
            {group.places.map((item) => (
              <Cell key={item.node.id} node={item.node} pools={item.pools} free={item.whole.free} verdict={verdicts?.get(item.node.id)} tabbable={item.node.id === tabbable} onActive={setActive} />
            ))}
          </ul>
        </section>
      ))}
    </div>
  );
}

function GroupHead({ group: { name, places } }: { group: Group }): ReactNode {
  const { free, largest } = summed(places);
  return (
    <div className="row wrap cap-group">
      <h2>
        <bdi>{name}</bdi>
      </h2>
      <span className="muted">
        {count(places.length, "node")}, {bytes(free)} free, largest block {bytes(largest)}
      </span>
    </div>
  );
}

const KEYS: Readonly<Record<string, (cells: readonly HTMLElement[], at: number, currentCell: HTMLElement) => HTMLElement | undefined>> = {
  ArrowRight: (cells, at) => cells[at + 1],
  ArrowLeft: (cells, at) => cells[at - 1],
  ArrowDown: (cells, at, currentCell) => nextRow(currentCell, cells.slice(at + 1)),
  ArrowUp: (cells, at, currentCell) => nextRow(currentCell, cells.slice(0, at).reverse()),
  Home: (cells) => cells[0],
  End: (cells) => cells.at(-1),
};

/** The cell to which a key moves the focus; null for other keys. */
function step(map: HTMLElement | null, event: KeyboardEvent): HTMLElement | null {
  const key = KEYS[event.key];
  if (map === null || key === undefined || event.ctrlKey || event.metaKey || event.altKey) return null;
  const cells = [...map.querySelectorAll<HTMLElement>(".cap-cell")];
  const at = cells.findIndex((cell) => cell === event.target);
  const currentCell = cells[at];
  return currentCell === undefined ? null : (key(cells, at, currentCell) ?? currentCell);
}

/** The cell of the next row that lies nearest below or above; the rows come in the order of `cells`. */
function nextRow(currentCell: HTMLElement, cells: readonly HTMLElement[]): HTMLElement {
  const from = currentCell.getBoundingClientRect();
  let best = currentCell;
  let row: number | null = null;
  let least = Infinity;
  for (const cell of cells) {
    const { top, left } = cell.getBoundingClientRect();
    if (Math.abs(top - from.top) < 1) continue;
    row ??= top;
    if (Math.abs(top - row) >= 1) break;
    const far = Math.abs(left - from.left);
    if (far < least) [best, least] = [cell, far];
  }
  return best;
}

interface CellProps extends Pick<Place, "node" | "pools"> {
  /** In all pools together. */
  free: number;
  verdict: Verdict | undefined;
  tabbable: boolean;
  onActive: (id: string) => void;
}

const same = (previous: CellProps, after: CellProps) =>
  previous.node === after.node && previous.tabbable === after.tabbable && previous.pools.length === after.pools.length && previous.pools.every((pool, at) => pool.total === after.pools[at]?.total && pool.free === after.pools[at].free && pool.used === after.pools[at].used) && previous.verdict?.words === after.verdict?.words;

const Cell = memo(function Cell({ node, pools, free, verdict, tabbable, onActive }: CellProps): ReactNode {
  const status = shownStatus(node);
  const words = [...pools.map(wordsOf), ...(isOpen(node) ? [] : [status]), ...(verdict === undefined ? [] : [verdict.words])].join("; ");
  const stateText = verdict?.tone === "bad" ? verdict.words : `${bytes(free)} free`;
  return (
    <li className="cap-place">
      {/* Named by its content, so that the name has what is seen: who speaks to the page says that. */}
      <Link
        className={`cap-cell ${verdict?.tone ?? ""}`}
        to={`/app/nodes/${node.id}`}
        tabIndex={tabbable ? 0 : -1}
        data-open={isOpen(node) || undefined}
        title={`${node.name}: ${words}`}
        onFocus={() => onActive(node.id)}
      >
        <span className="cap-name">
          <bdi className="cap-node">{node.name}</bdi>{" "}
          {verdict !== undefined ? <b className={`cap-verdict ${verdict.tone}`}>{verdict.mark}</b> : !isOpen(node) && <span className="cap-status">{status}</span>}
        </span>{" "}
        {pools.map((pool) => (
          <Bar key={pool.name} pool={pool} />
        ))}
        <span className="cap-said">{stateText}</span>
        <span className="visually-hidden">: {words}</span>
      </Link>
    </li>
  );
}, same);

/** "GPU 0: 3 GiB used, 1 GiB reserved, 20 GiB free of 24 GiB, 40% busy" */
function wordsOf({ name, used, reserved, free, total, utilization }: Pool): string {
  const held = reserved > 0 ? `, ${bytes(reserved)} reserved` : "";
  const busy = utilization === null ? "" : `, ${utilization}% busy`;
  return `${name === "" ? "" : `${name}: `}${bytes(used)} used${held}, ${bytes(free)} free of ${bytes(total)}${busy}`;
}

function Bar({ pool: { used, reserved, total } }: { pool: Pool }): ReactNode {
  const share = (part: number) => `${(100 * part) / Math.max(total, 1)}%`;
  return (
    <span className={`bar ${fillOf(used + reserved, total)}`} aria-hidden="true">
      <span style={{ width: share(used) }} />
      <span className="reserved" style={{ width: share(reserved) }} />
    </span>
  );
}
