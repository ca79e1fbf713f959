// The line above the list: how many are shown and how, or, once something is selected, what can be done with it.
import type { ReactNode } from "react";
import { download } from "../../lib/download";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { MeterLegend } from "../../ui/bars";
import { Button } from "../../ui/button";
import { Menu } from "../../ui/menu";
import { csv, type Selection } from "../../ui/rows";
import { LIST_VERBS, refusalOfAll, VERB_LABELS, type Action } from "./actions";
import { COLUMNS, EXPORTED } from "./columns";
import { withView, type Filter, type SetFilter } from "./filter";

interface BulkBarProps {
  shown: readonly LiveNode[];
  nodes: ReadonlyMap<string, LiveNode>;
  selection: Selection;
  filter: Filter;
  onFilter: SetFilter;
  onAct: (action: Action) => void;
  /** Shows everything again; null if nothing is hidden. */
  onClear: (() => void) | null;
}

export function BulkBar({ shown, nodes, selection, filter, onFilter, onAct, onClear }: BulkBarProps): ReactNode {
  const selected = [...selection.ids].flatMap((id) => nodes.get(id) ?? []);
  const clear = onClear !== null && (
    <Button small kind="ghost" onClick={onClear}>
      Clear filters
    </Button>
  );
  if (selected.length === 0) {
    return (
      <div className="bulk-bar">
        <span className="muted">{shown.length === nodes.size ? count(nodes.size, "node") : `${shown.length} of ${count(nodes.size, "node")}`}</span>
        {clear}
        <span className="grow" />
        <MeterLegend />
        <ViewMenu filter={filter} onFilter={onFilter} />
        <Button small onClick={() => download("nodes.csv", csv(EXPORTED, shown), "text/csv")}>
          Export CSV
        </Button>
      </div>
    );
  }
  const visible = new Set(shown);
  const hidden = selected.filter((node) => !visible.has(node)).length;
  return (
    <div className="bulk-bar on" role="toolbar" aria-label="Selected nodes">
      <strong>
        {selected.length} selected
        {hidden > 0 && <span className="muted"> ({hidden} hidden by the filter)</span>}
      </strong>
      {LIST_VERBS.map((verb) => (
        <Button key={verb} small kind={verb === "deregister" ? "danger" : "plain"} refusal={refusalOfAll(verb, selected)} onClick={() => onAct({ verb, nodes: selected })}>
          {VERB_LABELS[verb]}…
        </Button>
      ))}
      {shown.length > selected.length - hidden && (
        <Button small kind="ghost" onClick={() => selection.toggle(shown.map((node) => node.id))}>
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

/** Row height and columns; what the table has no width for stays hidden. */
function ViewMenu({ filter, onFilter }: Pick<BulkBarProps, "filter" | "onFilter">): ReactNode {
  const item = (label: string, checked: boolean, view: Partial<Filter>) => ({
    label,
    checked,
    onSelect: (event: Event) => {
      event.preventDefault();
      onFilter((previous) => withView(previous, { ...previous, ...view }));
    },
  });
  const columns = COLUMNS.slice(1).map(({ key, title }) => {
    const on = filter.columns.includes(key);
    return item(title, on, { columns: COLUMNS.flatMap((column) => ((column.key === key ? !on : filter.columns.includes(column.key)) ? [column.key] : [])) });
  });
  return <Menu name="View" trigger={<Button small>View <span aria-hidden="true">▾</span></Button>} items={[item("One line per row", filter.dense, { dense: !filter.dense }), ...columns]} />;
}
