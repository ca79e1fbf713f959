// Open identity conflicts of the node.
import { useState, type ReactNode } from "react";
import type { LiveNode } from "../../live/messages";
import { ConflictCard, Decide, type ConflictDialog } from "../shared/conflicts";
import { useConflicts } from "./data";
import { Fetched, Panel } from "./panel";

export function Conflicts({ node }: { node: LiveNode }): ReactNode {
  const claims = useConflicts(node.id);
  const [dialog, setDialog] = useState<ConflictDialog | null>(null);
  return (
    <Panel title="Identity conflicts" className="nd-danger">
      <Fetched query={claims} subject="the claims">
        {(open) => open.map((claim) => <ConflictCard key={claim.id} conflict={claim} fingerprint={node.fingerprint} onOpenDialog={setDialog} />)}
      </Fetched>
      {dialog !== null && <Decide {...dialog} onClose={() => setDialog(null)} />}
    </Panel>
  );
}
