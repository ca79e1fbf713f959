// The nodes that can run a backend: the build that each kind of node installs, and why.
import type { ReactNode } from "react";
import { count } from "../lib/format";
import type { Runs } from "./catalogue";

interface VariantsProps {
  runs: { kinds: readonly Runs[]; able: number; total: number };
}

export function Variants({ runs: { kinds, able, total } }: VariantsProps): ReactNode {
  if (total === 0) return null;
  if (able === 0) return <div className="muted">No compatible nodes</div>;
  return (
    <details className="variants">
      <summary className="muted">
        Runs on {able === total ? (total === 1 ? "your node" : `all ${total} nodes`) : `${able} of ${count(total, "node")}`}
      </summary>
      <ul>
        {kinds.map((kind) => (
          <li key={kind.capability}>
            <strong>{kind.capability}</strong> ({count(kind.nodes, "node")}): {kind.build} <span className="muted">({kind.reason})</span>
          </li>
        ))}
      </ul>
    </details>
  );
}
