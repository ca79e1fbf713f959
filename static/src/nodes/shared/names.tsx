// Nodes by name in a question about many of them: the first ten, the others on demand.
import { useState, type ReactNode } from "react";
import type { LiveNode } from "../../live/messages";
import { Button } from "../../ui/button";
import { written } from "./labels";
import "./shared.css";

const NAMED_FIRST = 10;

/** Each node with the text beside its name. */
export function Names({ nodes }: { nodes: readonly (readonly [node: LiveNode, said: ReactNode])[] }): ReactNode {
  const [isExpanded, setIsExpanded] = useState(false);
  const shown = isExpanded ? nodes : nodes.slice(0, NAMED_FIRST);
  return (
    <div className="stack">
      {/* Scrolled by keys as well. */}
      <ul className="verb-nodes" tabIndex={0} aria-label="Nodes">
        {shown.map(([node, text]) => (
          <li key={node.id} className="verb-node">
            <bdi className="name" title={node.name}>
              {node.name}
            </bdi>
            {text}
          </li>
        ))}
      </ul>
      {shown.length < nodes.length && (
        <Button small kind="ghost" onClick={() => setIsExpanded(true)}>
          and {nodes.length - shown.length} more
        </Button>
      )}
    </div>
  );
}

/** Labels of a node or a selector, `key=value` each. */
export function LabelChips({ labels, className = "tag anywhere" }: { labels: readonly (readonly [string, string])[]; className?: string }): ReactNode {
  return (
    <span className="chips">
      {labels.map(([key, value]) => (
        <bdi key={key} className={className}>
          {written(key, value)}
        </bdi>
      ))}
    </span>
  );
}
