// The slots of the node by model, and what loads have reserved of its memory: which load holds how much, and what the
// loaded replicas were estimated to need.
import type { ReactNode } from "react";
import { bytes, compareNames } from "../../lib/format";
import type { LiveModel, LiveNode } from "../../live/messages";
import type { Column } from "../../ui/rows";
import { Table } from "../../ui/table";
import { Panel } from "./panel";

export interface SlotRow {
  model: string;
  used: number;
  /** The number of slots that the model may have here. */
  most: number;
  free: number;
  /** Bytes that loads under way hold. */
  loading: number;
  /** Bytes that the others were estimated to need; 0 if none is known. */
  estimated: number;
}

const UNDER_WAY = new Set<LiveModel["state"]>(["staging", "loading"]);

/** A row in any state takes a slot. */
export function slotRows({ models, max_replicas_per_model: cap }: Pick<LiveNode, "models" | "max_replicas_per_model">): SlotRow[] {
  const rows = new Map<string, SlotRow>();
  for (const { model_name: model, state, vram_needed: needed } of models) {
    const row = rows.get(model) ?? { model, used: 0, most: cap, free: cap, loading: 0, estimated: 0 };
    row.used += 1;
    row.free = Math.max(0, cap - row.used);
    row[UNDER_WAY.has(state) ? "loading" : "estimated"] += needed;
    rows.set(model, row);
  }
  return [...rows.values()].sort((left, right) => compareNames(left.model, right.model));
}

export function Slots({ node }: { node: LiveNode }): ReactNode {
  const rows = slotRows(node);
  if (rows.length === 0 && node.reserved_vram <= 0) return null;
  return (
    <Panel title="Slots and reservations" aside={<span className="muted">{node.reserved_vram > 0 ? `${bytes(node.reserved_vram)} reserved since the last reading` : "nothing reserved since the last reading"}</span>}>
      {rows.length > 0 && (
        <div className="table-scroll">
          <Table name="Slots" columns={COLUMNS} rows={rows} rowId={modelOf} rowName={modelOf} />
        </div>
      )}
      <p className="muted">A model without a row here has {node.max_replicas_per_model} free.</p>
    </Panel>
  );
}

const modelOf = ({ model }: SlotRow) => model;

const COLUMNS: readonly Column<SlotRow>[] = [
  { key: "model", title: "Model", value: modelOf, cell: ({ model }) => <bdi>{model}</bdi> },
  { key: "used", title: "Slots used", numeric: true, value: ({ used }) => used, cell: ({ used, most }) => `${used} of ${most}` },
  { key: "free", title: "Free", numeric: true, value: ({ free }) => free, cell: ({ free }) => free },
  { key: "loading", title: "Reserved by its load", numeric: true, value: ({ loading }) => loading, cell: ({ loading }) => (loading > 0 ? bytes(loading) : "–") },
  { key: "estimated", title: "Estimated for replicas", numeric: true, value: ({ estimated }) => estimated, cell: ({ estimated }) => (estimated > 0 ? bytes(estimated) : "–") },
];
