// Workers that wait for an approval, on top of everything: what an approver needs of each, and the risk in words.
import { memo, useLayoutEffect, useMemo, useRef, useState, type ReactNode, type RefObject } from "react";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { Button } from "../../ui/button";
import { IdentityFacts, RISK, WEAK_RISK } from "../shared/identity";
import { refusal } from "../shared/verbs";
import type { Action } from "./actions";
import { room } from "./room";

const OPEN_FIRST = 3;

interface PendingProps {
  nodes: ReadonlyMap<string, LiveNode>;
  onAct: (action: Action) => void;
}

/** Those that somebody has to decide about: a rejected one was decided. The longest waiting first. */
export function waiting(nodes: Iterable<LiveNode>): LiveNode[] {
  return [...nodes]
    .filter((node) => node.status === "pending" && node.rejected === null)
    .sort((left, right) => (left.created_at < right.created_at ? -1 : 1));
}

export const Pending = memo(function Pending({ nodes, onAct }: PendingProps): ReactNode {
  const [all, setAll] = useState(false);
  const found = useMemo(() => waiting(nodes.values()), [nodes]);
  if (found.length === 0) return null;
  const shown = all ? found : found.slice(0, OPEN_FIRST);
  return (
    <section className="pinned stack" style={room(shown.length)} aria-labelledby="pending-title">
      <div className="row wrap spread">
        <h2 id="pending-title">{count(found.length, "worker waits", "workers wait")} for an approval</h2>
        <div className="row wrap">
          {found.length > OPEN_FIRST && (
            <Button small aria-expanded={all} onClick={() => setAll(!all)}>
              {all ? "Show fewer" : `Show all ${found.length}`}
            </Button>
          )}
          {found.length > 1 && (
            <Button small onClick={() => onAct({ verb: "approve", nodes: found })}>
              Approve all {found.length}…
            </Button>
          )}
        </div>
      </div>
      <p className="risk">{RISK}</p>
      <ul className="pinned-cards">
        {shown.map((node) => (
          <PendingCard key={node.id} node={node} onAct={onAct} />
        ))}
      </ul>
    </section>
  );
});

const PendingCard = memo(function PendingCard({ node, onAct }: { node: LiveNode; onAct: PendingProps["onAct"] }): ReactNode {
  const nodes = [node];
  const card = useRef<HTMLLIElement>(null);
  useFocusHandedOn(card);
  return (
    <li ref={card} className="pinned-card stack" data-testid={`pending-${node.id}`}>
      <h3 className="name" title={node.name}>
        <bdi>{node.name}</bdi>
      </h3>
      <IdentityFacts node={node} />
      {node.weak_identity && <p className="risk">{WEAK_RISK}</p>}
      <div className="row wrap">
        <Button
          kind="primary"
          refusal={refusal("approve", node)}
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

/** A card that goes with the focus in it, because its node was approved, gives the focus to the page. */
function useFocusHandedOn(card: RefObject<HTMLElement | null>): void {
  useLayoutEffect(() => {
    const element = card.current;
    return () => {
      if (element?.contains(document.activeElement) === true) document.getElementById("main")?.focus({ preventScroll: true });
    };
  }, [card]);
}
