// The slots of the node by model, and what loads have reserved of its memory: which load holds how much, and what the
// loaded replicas were estimated to need.
import type { ReactNode } from "react";
import { bytes } from "../../lib/format";
import type { LiveModel, LiveNode } from "../../live/messages";
import { Panel } from "./panel";

export interface SlotRow {
  model: string;
  used: number;
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
    const row = rows.get(model) ?? { model, used: 0, free: cap, loading: 0, estimated: 0 };
    row.used += 1;
    row.free = Math.max(0, cap - row.used);
    row[UNDER_WAY.has(state) ? "loading" : "estimated"] += needed;
    rows.set(model, row);
  }
  return [...rows.values()].sort((left, right) => left.model.localeCompare(right.model, undefined, { numeric: true }));
}

export function Slots({ node }: { node: LiveNode }): ReactNode {
  const rows = slotRows(node);
  if (rows.length === 0 && node.reserved_vram <= 0) return null;
  return (
    <Panel title="Slots and reservations" aside={<span className="muted">{node.reserved_vram > 0 ? `${bytes(node.reserved_vram)} reserved since the last reading` : "nothing reserved since the last reading"}</span>}>
      {rows.length > 0 && (
        <div className="nd-scroll">
          <table className="nd-table">
            <thead>
              <tr>
                <th scope="col">Model</th>
                <th scope="col" className="nd-number">Slots used</th>
                <th scope="col" className="nd-number">Free</th>
                <th scope="col" className="nd-number">Reserved by its load</th>
                <th scope="col" className="nd-number">Estimated of replicas</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr key={row.model}>
                  <th scope="row">
                    <bdi>{row.model}</bdi>
                  </th>
                  <td data-label="Slots used" className="nd-number">
                    {row.used} of {node.max_replicas_per_model}
                  </td>
                  <td data-label="Free" className="nd-number">{row.free}</td>
                  <td data-label="Reserved by its load" className="nd-number">{row.loading > 0 ? bytes(row.loading) : "–"}</td>
                  <td data-label="Estimated of replicas" className="nd-number">{row.estimated > 0 ? bytes(row.estimated) : "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <p className="muted">A model without a row here has {node.max_replicas_per_model} free.</p>
    </Panel>
  );
}
