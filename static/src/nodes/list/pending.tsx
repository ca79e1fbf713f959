// Workers that wait for an approval, on top of everything: what an approver needs of each, and the risk in words.
import { memo, useMemo, type ReactNode } from "react";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { Button } from "../../ui/button";
import { IdentityFacts, RISK, WEAK_RISK } from "../shared/identity";
import { refusal } from "../shared/verbs";
import type { Action } from "./actions";
import { Pinned } from "./pinned";

const OPEN_FIRST = 3;

interface PendingProps {
  nodes: ReadonlyMap<string, LiveNode>;
  /** A join token whose machines are shown elsewhere on the page. */
  except: string;
  onAct: (action: Action) => void;
}

/** The nodes that need a decision, the longest waiting first; a rejected one needs none. */
export function waiting(nodes: Iterable<LiveNode>, except = ""): LiveNode[] {
  return [...nodes]
    .filter((node) => node.status === "pending" && node.rejected === null && (except === "" || node.joined?.token !== except))
    .sort((left, right) => (left.created_at < right.created_at ? -1 : 1));
}

export const Pending = memo(function Pending({ nodes, except, onAct }: PendingProps): ReactNode {
  const pendingNodes = useMemo(() => waiting(nodes.values(), except), [nodes, except]);
  if (pendingNodes.length === 0) return null;
  const approveAll = pendingNodes.length > 1 && (
    <Button small onClick={() => onAct({ verb: "approve", nodes: pendingNodes })}>
      Approve all {pendingNodes.length}…
    </Button>
  );
  return (
    <Pinned
      id="pending"
      title={`${count(pendingNodes.length, "worker")} awaiting approval`}
      risk={RISK}
      first={OPEN_FIRST}
      actions={approveAll}
      cards={pendingNodes.map((node) => (
        <PendingCard key={node.id} node={node} onAct={onAct} />
      ))}
    />
  );
});

const PendingCard = memo(function PendingCard({ node, onAct }: { node: LiveNode; onAct: PendingProps["onAct"] }): ReactNode {
  const nodes = [node];
  const not = refusal("approve", node);
  return (
    <li className="pinned-card stack" data-testid={`pending-${node.id}`}>
      <h3 className="name" title={node.name}>
        <bdi>{node.name}</bdi>
      </h3>
      <IdentityFacts node={node} />
      {node.weak_identity && <p className="risk">{WEAK_RISK}</p>}
      {not !== "" && <p className="muted">Cannot be approved yet: {not}.</p>}
      <div className="row wrap">
        <Button
          kind="primary"
          refusal={not}
          aria-label={`Approve ${node.name}`}
          onClick={() => onAct({ verb: "approve", nodes })}
        >
          Approve…
        </Button>
        <Button aria-label={`Reject ${node.name}`} onClick={() => onAct({ verb: "reject", nodes })}>
          Reject…
        </Button>
      </div>
    </li>
  );
});
