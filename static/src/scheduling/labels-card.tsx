// The labels that selectors can ask for, node by node, from the feed: it stands beside the rules and does not need them.
import { useDeferredValue, useId, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { isLoaded, useThrottledNodes } from "../backends/throttled-nodes";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import type { LiveNode } from "../live/messages";
import { NodeStatus } from "../nodes/shared/node-status";
import { listedLabels } from "../nodes/shared/labels";
import { LabelChips } from "../nodes/shared/names";
import { Button } from "../ui/button";
import { Loading } from "../ui/empty";
import { AT_FIRST, labelled, PAGE_SIZE } from "./labels";
import { candidates } from "./rules";

export function LabelsCard(): ReactNode {
  const id = useId();
  const [open, setOpen] = useState(true);
  return (
    <section className="nd-panel" aria-labelledby={`${id}-title`}>
      <header>
        <h2 id={`${id}-title`}>Node labels</h2>
        <Button small aria-expanded={open} aria-controls={id} aria-label={`${open ? "Hide" : "Show"} node labels`} onClick={() => setOpen(!open)}>
          {open ? "Hide" : "Show"}
        </Button>
      </header>
      <div id={id} hidden={!open}>
        {open && <Nodes />}
      </div>
    </section>
  );
}

function Nodes(): ReactNode {
  const nodesById = useThrottledNodes();
  const lost = useLive((state) => state.connection === "stale");
  const [term, setTerm] = useState("");
  const [limit, setLimit] = useState(AT_FIRST);
  const settled = useDeferredValue(term);
  const nodes = useMemo(() => candidates(nodesById.values()), [nodesById]);
  const matches = useMemo(() => labelled(nodes, settled), [nodes, settled]);
  if (!isLoaded(nodesById)) return lost ? <p role="alert">The live feed is unreachable; reconnecting automatically.</p> : <Loading subject="node labels" />;
  if (nodes.length === 0) return <p className="muted">No approved worker yet.</p>;
  return (
    <div className="stack">
      <div className="row wrap">
        <input
          className="input rule-filter"
          type="search"
          aria-label="Search node labels"
          placeholder="Name, key or value"
          value={term}
          onChange={(event) => {
            setTerm(event.target.value);
            setLimit(AT_FIRST);
          }}
        />
        <span className="muted" role="status">
          {matches.length} of {count(nodes.length, "node")}
        </span>
      </div>
      {matches.length === 0 && <p className="muted">No node matches.</p>}
      <ul className="label-nodes" aria-label="Nodes and their labels">
        {matches.slice(0, limit).map((node) => (
          <Labelled key={node.id} node={node} />
        ))}
      </ul>
      {matches.length > limit && (
        <div className="label-more">
          <Button onClick={() => setLimit(limit + PAGE_SIZE)}>Show {Math.min(PAGE_SIZE, matches.length - limit)} more</Button>
        </div>
      )}
    </div>
  );
}

function Labelled({ node }: { node: LiveNode }): ReactNode {
  const labels = listedLabels(node);
  return (
    <li className="label-node">
      <div className="row spread">
        <Link className="name" to={`/app/nodes/${node.id}`}>
          <bdi>{node.name}</bdi>
        </Link>
        <NodeStatus node={node} />
      </div>
      {labels.length === 0 ? (
        <span className="muted">No labels</span>
      ) : (
        <LabelChips labels={labels} />
      )}
    </li>
  );
}
