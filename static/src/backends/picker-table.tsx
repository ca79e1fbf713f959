// The nodes of the picker as a table: a box, the node, its hardware, and what will happen or happens there.
import { memo, useRef, useEffect, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count } from "../lib/format";
import type { LiveNode } from "../live/messages";
import { NextCheck, SilenceNotice } from "../operations/lines";
import { pageOf, rests, stateOf } from "../operations/words";
import { ProgressBar } from "../ui/bars";
import { Button } from "../ui/button";
import { NodeStatus } from "../nodes/shared/node-status";
import { isAutomatic } from "../nodes/shared/labels";
import { onNode, type Progress } from "./picker-model";
import type { Row } from "./picker-rows";

const DRAWN = 100;
const LABELS = 3;

interface TableProps {
  rows: readonly Row[];
  selected: ReadonlySet<string>;
  onToggle: (ids: readonly string[], on: boolean) => void;
  onRetry: (id: string) => void;
}

export function NodeTable({ rows, selected, onToggle, onRetry }: TableProps): ReactNode {
  const [limit, setLimit] = useState(DRAWN);
  const open = rows.filter((row) => row.open).map((row) => row.node.id);
  const chosen = open.filter((id) => selected.has(id)).length;
  return (
    <div className="picker-scroll" role="group" tabIndex={0} aria-label="Nodes">
      <table className="picker-table">
        <thead>
          <tr>
            <th scope="col">
              <AllBox chosen={chosen} open={open.length} onToggle={(on) => onToggle(open, on)} />
            </th>
            <th scope="col">Node</th>
            <th scope="col">State</th>
            <th scope="col">Hardware</th>
            <th scope="col">Action</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, limit).map((row) => (
            <NodeRow key={row.node.id} row={row} checked={row.open && selected.has(row.node.id)} onToggle={onToggle} onRetry={onRetry} />
          ))}
        </tbody>
      </table>
      {rows.length > limit && <Button onClick={() => setLimit(limit + DRAWN)}>Show more ({rows.length - limit})</Button>}
    </div>
  );
}

function AllBox({ chosen, open, onToggle }: { chosen: number; open: number; onToggle: (on: boolean) => void }): ReactNode {
  const box = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (box.current !== null) box.current.indeterminate = chosen > 0 && chosen < open;
  }, [chosen, open]);
  return (
    <input
      ref={box}
      type="checkbox"
      aria-label="Select all visible"
      checked={open > 0 && chosen === open}
      disabled={open === 0}
      onChange={(event) => onToggle(event.target.checked)}
    />
  );
}

interface NodeRowProps {
  row: Row;
  checked: boolean;
  onToggle: TableProps["onToggle"];
  onRetry: TableProps["onRetry"];
}

function equal(left: NodeRowProps, right: NodeRowProps): boolean {
  const [first, second] = [left.row, right.row];
  return (
    first.node === second.node &&
    first.expected.text === second.expected.text &&
    first.progress === null &&
    second.progress === null &&
    left.checked === right.checked &&
    left.onToggle === right.onToggle
  );
}

const NodeRow = memo(function NodeRow({ row, checked, onToggle, onRetry }: NodeRowProps): ReactNode {
  const { node, progress, expected, open } = row;
  return (
    <tr className={checked ? "chosen" : ""} data-node={node.id}>
      <td>
        <input
          type="checkbox"
          aria-label={`Select ${node.name}`}
          checked={checked}
          disabled={!open}
          onChange={(event) => onToggle([node.id], event.target.checked)}
        />
      </td>
      <td>
        <div className="name picker-node" title={node.name}>
          {node.name}
        </div>
        <Labels node={node} />
      </td>
      <td>
        <NodeStatus node={node} />
      </td>
      <td className="muted picker-hardware">{hardware(node)}</td>
      <td className="picker-what">
        {progress === null ? <span className={`outlook ${expected.kind}`}>{expected.text}</span> : <How row={row} progress={progress} onRetry={onRetry} />}
      </td>
    </tr>
  );
}, equal);

function Labels({ node }: { node: LiveNode }): ReactNode {
  const labels = Object.entries(node.labels).filter(([key]) => !isAutomatic(key)).sort();
  if (labels.length === 0) return null;
  return (
    <div className="row wrap picker-labels">
      {labels.slice(0, LABELS).map(([key, value]) => (
        <span key={key} className="tag name" title={`${key}=${value}`}>
          {key}={value}
        </span>
      ))}
      {labels.length > LABELS && <span className="muted">+{labels.length - LABELS}</span>}
    </div>
  );
}

function hardware(node: LiveNode): string {
  if (node.total_vram > 0) return `${node.gpu_vendor || "GPU"} ${bytes(node.total_vram)}`;
  return node.total_ram > 0 ? `CPU, ${bytes(node.total_ram)} RAM` : "not reported";
}

function How({ row, progress, onRetry }: { row: Row; progress: Progress; onRetry: (id: string) => void }): ReactNode {
  const { operation, node } = row;
  return (
    <div className="stack how">
      <div className={`row ${progress.ended === "badly" ? "" : "wrap"}`}>
        <span className={`pill ${progress.tone}`}>{progress.word}</span>
        {progress.value !== null && <span className="how-percent">{progress.value}%</span>}
        {progress.detail !== "" && <bdi className={progress.ended === "badly" ? "how-reason" : "muted"}>{progress.detail}</bdi>}
        {operation !== undefined && progress.ended === "no" && rests(stateOf(operation)) && <NextCheck operation={operation} />}
        {operation !== undefined && progress.ended === "no" && <SilenceNotice of={onNode(operation, node.id)} />}
      </div>
      {progress.value !== null && <ProgressBar value={progress.value} name={`Installing on ${node.name}`} />}
      {progress.ended === "badly" && (
        <div className="row wrap">
          <Button small aria-label={`Retry ${node.name}`} onClick={() => onRetry(node.id)}>
            Retry
          </Button>
          {operation !== undefined && <Link to={pageOf(operation)}>Details</Link>}
        </div>
      )}
    </div>
  );
}

/** "2 pending nodes": what cannot be chosen and is not in the table, with the way to them. */
export function NotListed({ pending }: { pending: number }): ReactNode {
  if (pending === 0) return null;
  return (
    <p className="muted">
      {count(pending, "node")} {pending === 1 ? "is" : "are"} awaiting approval and not listed. <Link to="/app/nodes?state=pending">Review</Link>
    </p>
  );
}
