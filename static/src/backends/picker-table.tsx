// The nodes of the picker as a table: a box, the node, its hardware, and what will happen or happens there.
import { useMemo, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count } from "../lib/format";
import { gpuWords } from "../live/gpus";
import type { LiveNode } from "../live/messages";
import { NextCheck, SilenceNotice } from "../operations/lines";
import { pageOf, rests, stateOf } from "../operations/words";
import { ProgressBar } from "../ui/bars";
import { Button } from "../ui/button";
import type { Column, Selection } from "../ui/rows";
import { Table } from "../ui/table";
import { NodeStatus } from "../nodes/shared/node-status";
import { isAutomatic } from "../nodes/shared/labels";
import { onNode, type Progress } from "./picker-model";
import type { Row } from "./picker-rows";

const DRAWN = 100;
const LABELS = 3;

interface TableProps {
  rows: readonly Row[];
  selection: Selection;
  /** Must stay the same function: rows compare it. */
  onRetry: (id: string) => void;
}

export function NodeTable({ rows, selection, onRetry }: TableProps): ReactNode {
  const columns = useMemo(() => columnsOf(onRetry), [onRetry]);
  return (
    <div className="picker-scroll" role="group" tabIndex={0} aria-label="Nodes">
      <Table name="Nodes" className="picker-table" columns={columns} rows={rows} rowId={idOf} rowName={nameOf} selection={selection} selectable={isOpen} alike={alike} first={DRAWN} />
    </div>
  );
}

const idOf = ({ node }: Row) => node.id;
const nameOf = ({ node }: Row) => node.name;
const isOpen = ({ open }: Row) => open;

function alike(first: Row, second: Row): boolean {
  return first.node === second.node && first.expected.text === second.expected.text && first.progress === null && second.progress === null;
}

function columnsOf(onRetry: (id: string) => void): readonly Column<Row>[] {
  return [
    {
      key: "node",
      title: "Node",
      value: nameOf,
      cell: ({ node }) => (
        <>
          <div className="name" title={node.name}>
            {node.name}
          </div>
          <Labels node={node} />
        </>
      ),
    },
    { key: "state", title: "State", value: ({ node }) => node.status, cell: ({ node }) => <NodeStatus node={node} /> },
    { key: "hardware", title: "Hardware", cell: ({ node }) => <span className="muted">{hardware(node)}</span> },
    {
      key: "action",
      title: "Action",
      cell: (row) => (row.progress === null ? <span className={`outlook ${row.expected.kind}`}>{row.expected.text}</span> : <How row={row} progress={row.progress} onRetry={onRetry} />),
    },
  ];
}

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
  if (node.total_vram > 0) return `${gpuWords(node) || "GPU"} ${bytes(node.total_vram)}`;
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
