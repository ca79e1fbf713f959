// Open identity conflicts, on top of the list. That there are some comes with the nodes; what they are is fetched,
// and fetched again when a count changes.
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { memo, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { call, client } from "../../api/client";
import { count } from "../../lib/format";
import { useChange } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { Loading } from "../../ui/empty";
import { Problem } from "../../ui/problem";
import { ConflictCard, Decide, type ConflictDialog } from "../shared/conflicts";
import { Pinned } from "./pinned";

const KEY = ["conflicts"];
const OPEN_FIRST = 2;

interface ConflictsProps {
  nodes: ReadonlyMap<string, LiveNode>;
}

export const Conflicts = memo(function Conflicts({ nodes }: ConflictsProps): ReactNode {
  const [dialog, setDialog] = useState<ConflictDialog | null>(null);
  return (
    <>
      <Open nodes={nodes} onOpenDialog={setDialog} />
      {dialog !== null && <Decide {...dialog} onClose={() => setDialog(null)} />}
    </>
  );
});

function Open({ nodes, onOpenDialog }: ConflictsProps & { onOpenDialog: (dialog: ConflictDialog) => void }): ReactNode {
  const { total, descriptions } = useMemo(() => openIn(nodes.values()), [nodes]);
  const queries = useQueryClient();
  useChange(descriptions, () => void queries.invalidateQueries({ queryKey: KEY }));
  const { data, error, refetch } = useQuery({
    queryKey: KEY,
    queryFn: ({ signal }) => call(client.GET("/api/nodes/conflicts", { signal })),
    enabled: total > 0,
  });
  if (total === 0) return null;
  // What was decided a moment ago is still in the answer of before.
  const shown = (data ?? []).filter((conflict) => (nodes.get(conflict.node_id)?.open_conflicts ?? 0) > 0);
  const hasMore = data !== undefined && data.length > 0 && data.length < total;
  return (
    <Pinned
      id="conflicts"
      title={`${count(total, "identity conflict")} to resolve`}
      risk="The node keeps running until you decide. An accepted claimant receives its models and prompts."
      first={OPEN_FIRST}
      cards={shown.map((conflict) => (
        <li key={conflict.id} className="pinned-card stack" data-testid={`conflict-${conflict.id}`}>
          <h3 className="name" title={conflict.node_name}>
            <Link to={`/app/nodes/${conflict.node_id}`}>
              <bdi>{conflict.node_name}</bdi>
            </Link>
          </h3>
          <ConflictCard conflict={conflict} fingerprint={nodes.get(conflict.node_id)?.fingerprint ?? ""} onOpenDialog={onOpenDialog} />
        </li>
      ))}
    >
      <Problem error={error} onRetry={() => void refetch()} />
      {data === undefined && error === null && <Loading subject="the conflicts" />}
      {hasMore && <p className="muted">The {data.length} latest are shown.</p>}
    </Pinned>
  );
}

/** The number of open conflicts, and a text that changes with each count. */
function openIn(nodes: Iterable<LiveNode>): { total: number; descriptions: string } {
  let total = 0;
  const descriptions: string[] = [];
  for (const node of nodes) {
    if (node.open_conflicts === 0) continue;
    total += node.open_conflicts;
    descriptions.push(`${node.id}:${node.open_conflicts}:${node.revision}`);
  }
  return { total, descriptions: descriptions.join(" ") };
}
