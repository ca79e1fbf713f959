// The selected nodes by ID. A selection survives filtering and sorting; a removed node is not in it.
import { useCallback, useMemo, useState } from "react";
import type { LiveNode } from "../../live/messages";

export interface Selection {
  ids: ReadonlySet<string>;
  nodes: readonly LiveNode[];
  toggle: (id: string) => void;
  /** Selects all of these, or none of them if all are. */
  toggleAll: (nodes: readonly LiveNode[]) => void;
  clear: () => void;
}

export function useSelection(nodesById: ReadonlyMap<string, LiveNode>): Selection {
  const [ids, setIds] = useState<ReadonlySet<string>>(new Set());
  const nodes = useMemo(() => [...ids].flatMap((id) => nodesById.get(id) ?? []), [ids, nodesById]);
  const toggle = useCallback((id: string) => setIds((previous) => without(previous, [id]) ?? new Set([...previous, id])), []);
  const toggleAll = useCallback((toggled: readonly LiveNode[]) => {
    const chosen = toggled.map((node) => node.id);
    setIds((previous) => {
      if (chosen.every((id) => previous.has(id))) return without(previous, chosen) ?? previous;
      return new Set([...previous, ...chosen]);
    });
  }, []);
  const clear = useCallback(() => setIds(new Set()), []);
  return { ids, nodes, toggle, toggleAll, clear };
}

/** Without these; null if none of them was there. */
function without(ids: ReadonlySet<string>, removedIds: readonly string[]): ReadonlySet<string> | null {
  const remaining = new Set(ids);
  for (const id of removedIds) remaining.delete(id);
  return remaining.size < ids.size ? remaining : null;
}
