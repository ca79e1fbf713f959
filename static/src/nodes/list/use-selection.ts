// Which nodes are selected, by id. A selection survives filtering and sorting; a node that went is not in it.
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

export function useSelection(known: ReadonlyMap<string, LiveNode>): Selection {
  const [ids, setIds] = useState<ReadonlySet<string>>(new Set());
  const nodes = useMemo(() => [...ids].flatMap((id) => known.get(id) ?? []), [ids, known]);
  const toggle = useCallback((id: string) => setIds((before) => without(before, [id]) ?? new Set([...before, id])), []);
  const toggleAll = useCallback((some: readonly LiveNode[]) => {
    const chosen = some.map((node) => node.id);
    setIds((before) => {
      if (chosen.every((id) => before.has(id))) return without(before, chosen) ?? before;
      return new Set([...before, ...chosen]);
    });
  }, []);
  const clear = useCallback(() => setIds(new Set()), []);
  return { ids, nodes, toggle, toggleAll, clear };
}

/** Without these; null if none of them was there. */
function without(ids: ReadonlySet<string>, gone: readonly string[]): ReadonlySet<string> | null {
  const left = new Set(ids);
  for (const id of gone) left.delete(id);
  return left.size < ids.size ? left : null;
}
