// Which of the nodes can run a backend: the build that each kind of node installs, and why that one.
import type { ReactNode } from "react";
import { count } from "../lib/format";
import type { Runs } from "./catalogue";

interface VariantsProps {
  runs: { kinds: readonly Runs[]; able: number; all: number };
}

export function Variants({ runs: { kinds, able, all } }: VariantsProps): ReactNode {
  if (all === 0) return null;
  if (able === 0) return <div className="muted">Runs on none of your nodes</div>;
  return (
    <details className="variants">
      <summary className="muted">
        Runs on {able === all ? (all === 1 ? "your node" : `all ${all} nodes`) : `${able} of ${count(all, "node")}`}
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
