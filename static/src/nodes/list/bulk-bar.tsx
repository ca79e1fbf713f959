// The line above the list: how many are shown, or, once something is selected, what can be done with it.
import type { ReactNode } from "react";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { MeterLegend } from "../../ui/bars";
import { Button } from "../../ui/button";
import { refusalOfAll, VERB_LABELS, type Action, type ListVerb } from "./actions";
import type { Selection } from "./use-selection";

interface BulkBarProps {
  shown: readonly LiveNode[];
  total: number;
  selection: Selection;
  onAct: (action: Action) => void;
  /** Shows everything again; null if nothing is hidden. */
  onClear: (() => void) | null;
}

const OFFERED: readonly ListVerb[] = ["approve", "reject", "drain", "resume", "label", "install", "deregister"];

export function BulkBar({ shown, total, selection, onAct, onClear }: BulkBarProps): ReactNode {
  const { nodes } = selection;
  const clear = onClear !== null && (
    <Button small kind="ghost" onClick={onClear}>
      Clear filters
    </Button>
  );
  if (nodes.length === 0) {
    return (
      <div className="bulk-bar">
        <span className="muted">{shown.length === total ? count(total, "node") : `${shown.length} of ${count(total, "node")}`}</span>
        {clear}
        <span className="grow" />
        <MeterLegend />
      </div>
    );
  }
  const visible = new Set(shown);
  const hidden = nodes.filter((node) => !visible.has(node)).length;
  return (
    <div className="bulk-bar on" role="toolbar" aria-label="Selected nodes">
      <strong>
        {nodes.length} selected
        {hidden > 0 && <span className="muted"> ({hidden} hidden by the filter)</span>}
      </strong>
      {OFFERED.map((verb) => (
        <Button key={verb} small kind={verb === "deregister" ? "danger" : "plain"} refusal={refusalOfAll(verb, nodes)} onClick={() => onAct({ verb, nodes })}>
          {VERB_LABELS[verb]}…
        </Button>
      ))}
      {shown.length > nodes.length - hidden && (
        <Button small kind="ghost" onClick={() => selection.toggleAll(shown)}>
          Select all {shown.length} shown
        </Button>
      )}
      <Button small kind="ghost" onClick={selection.clear}>
        Clear selection
      </Button>
      {clear}
    </div>
  );
}
