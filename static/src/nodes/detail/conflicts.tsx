// Who claims to be this node, as long as no one has decided.
import { useState, type ReactNode } from "react";
import type { LiveNode } from "../../live/messages";
import { ConflictCard, Decide, type Asked } from "../shared/conflicts";
import { useConflicts } from "./data";
import { Fetched, Panel } from "./panel";

export function Conflicts({ node }: { node: LiveNode }): ReactNode {
  const claims = useConflicts(node.id);
  const [asked, setAsked] = useState<Asked | null>(null);
  return (
    <Panel title="Identity conflicts" className="nd-danger">
      <Fetched query={claims} what="the claims">
        {(open) => open.map((claim) => <ConflictCard key={claim.id} conflict={claim} fingerprint={node.fingerprint} onAsk={setAsked} />)}
      </Fetched>
      {asked !== null && <Decide {...asked} onClose={() => setAsked(null)} />}
    </Panel>
  );
}
