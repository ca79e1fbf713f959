// The nodes of the cluster, live: what waits for a decision on top, then all of them, dense, filtered and sorted as
// the address says. The store changes many times a second; what is expensive follows behind (`useDeferredValue`),
// so that typing never waits for it.
import { memo, useCallback, useDeferredValue, useId, useMemo, useRef, useState, type CSSProperties, type ReactNode } from "react";
import { useNavigate } from "react-router";
import { useChange, useLive } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { AfterPaint } from "../../ui/after-paint";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Empty, Loading } from "../../ui/empty";
import { Menu } from "../../ui/menu";
import { sorted, useSelection, type Selection } from "../../ui/rows";
import { DataGrid, useMeasured } from "../../ui/table";
import { PageHead } from "../../ui/title";
import { count } from "../../lib/format";
import { useInAddress } from "../../lib/in-address";
import { InstallDialog } from "../shared/install-dialog";
import { ActionDialog, menuOf, type Action } from "./actions";
import { AddNode } from "./add-node";
import type { MadeJoinToken } from "./joining";
import { BulkBar } from "./bulk-bar";
import { COLUMNS } from "./columns";
import { Conflicts } from "./conflicts";
import { cleared, find, isFiltering, readFilter, writeFilter, type Filter, type SetFilter } from "./filter";
import { Filters } from "./filters";
import { Pending } from "./pending";
import { Pulse } from "./pulse";
import "./list.css";

export function NodesPage(): ReactNode {
  const present = useLive((state) => state.nodes);
  const nodes = useDeferredValue(present);
  const isLoaded = useLive((state) => state.nodesCursor !== null);
  const id = useId();
  const empty = isLoaded && present.size === 0;
  const [adding, setAdding] = useAdding(empty);
  const [token, setToken] = useState<MadeJoinToken | null>(null);
  const toggle = () => {
    // Only the one line that is shown holds the token: it is not shown again.
    setToken(null);
    setAdding(!adding);
  };
  return (
    <div className="nodes-page stack">
      <PageHead title="Nodes" note={nodes.size > 0 && !empty ? <Pulse nodes={nodes} /> : undefined}>
        {isLoaded && !empty && (
          <Button aria-expanded={adding} aria-controls={id} onClick={toggle}>
            Add a node
          </Button>
        )}
      </PageHead>
      {/* What follows behind has nothing yet: that is no empty cluster. */}
      {!empty && nodes.size === 0 && <Connecting />}
      {empty && <Empty title="No workers registered yet" />}
      {adding && <AddNode id={id} token={token} onToken={setToken} />}
      {nodes.size > 0 && !empty && (
        <AfterPaint>
          <Fleet nodes={nodes} joining={token?.id ?? ""} />
        </AfterPaint>
      )}
    </div>
  );
}

/** True if the steps of joining are open: by default while there is no node, and still when the first one comes. */
function useAdding(empty: boolean): [boolean, (adding: boolean) => void] {
  const [isOpen, setIsOpen] = useState<boolean | null>(null);
  const [began, setBegan] = useState(false);
  if (empty && !began) setBegan(true);
  return [empty || (isOpen ?? began), setIsOpen];
}

/** Nothing has come yet: says whether it is on its way or why not. */
function Connecting(): ReactNode {
  const connection = useLive((state) => state.connection);
  if (connection === "stale") return <Empty title="The live feed is unreachable">Reconnecting automatically.</Empty>;
  if (connection === "forbidden") return <Empty title="Only administrators can see the nodes." />;
  if (connection === "signed-out") return <Empty title="You are signed out.">Sign in to see the nodes.</Empty>;
  return <Loading subject="nodes" />;
}

interface FleetProps {
  nodes: ReadonlyMap<string, LiveNode>;
  /** The token whose machines wait for their approval in the steps of joining. */
  joining: string;
}

const Fleet = memo(function Fleet({ nodes, joining }: FleetProps): ReactNode {
  const [action, setAction] = useState<Action | null>(null);
  const close = useCallback(() => setAction(null), []);
  return (
    <>
      <div className="decisions">
        <Conflicts nodes={nodes} />
        <Pending nodes={nodes} except={joining} onAct={setAction} />
      </div>
      <NodeList nodes={nodes} onAct={setAction} />
      {action !== null && action.verb !== "install" && <ActionDialog action={action} onClose={close} />}
      {action?.verb === "install" && <InstallDialog nodeIds={action.nodes.map((node) => node.id)} onClose={close} />}
    </>
  );
});

interface NodeListProps {
  nodes: ReadonlyMap<string, LiveNode>;
  onAct: (action: Action) => void;
}

function NodeList({ nodes, onAct }: NodeListProps): ReactNode {
  const [filter, setFilter] = useInAddress(readFilter, writeFilter);
  const settled = useDeferredValue(filter);
  const { matches, counts, problems } = useMatches(nodes, settled);
  const selection = useSelection();
  const tools = useRef<HTMLDivElement>(null);
  const covered = useMeasured(tools, (element) => element.offsetHeight);
  const clear = useCallback(() => setFilter(cleared), [setFilter]);
  return (
    <section className="roster" aria-label="All nodes" tabIndex={-1} data-content="" style={{ "--tools": `${covered}px` } as CSSProperties}>
      <div ref={tools} className="roster-tools">
        <Filters filter={filter} counts={counts} problems={problems} onFilter={setFilter} />
        <BulkBar shown={matches} {...{ nodes, selection, filter, onAct }} onFilter={setFilter} onClear={isFiltering(settled) ? clear : null} />
      </div>
      {matches.length > 0 ? <Listing matches={matches} filter={settled} {...{ selection, covered, onAct }} onFilter={setFilter} /> : <NoMatches problems={problems} onClear={clear} />}
    </section>
  );
}

/** The filtered nodes, in order. Announces their number when the filter changes, not when the nodes do. */
function useMatches(nodes: ReadonlyMap<string, LiveNode>, filter: Filter) {
  const { nodes: unsorted, counts, problems } = useMemo(() => find(nodes.values(), filter), [nodes, filter]);
  const matches = useMemo(() => sorted(unsorted, COLUMNS, filter.sort, nameOf, idOf), [unsorted, filter.sort]);
  useChange(filter, () => {
    if (isFiltering(filter)) announce(`${count(matches.length, "node")} shown`);
  });
  return { matches, counts, problems };
}

const nameOf = (node: LiveNode) => node.name;
const idOf = (node: LiveNode) => node.id;

function NoMatches({ problems, onClear }: { problems: readonly string[]; onClear: () => void }): ReactNode {
  return (
    <Empty title="No matching nodes">
      {problems.length === 0 && <p>All terms must match. “?” beside the filter shows the syntax.</p>}
      <Button onClick={onClear}>Clear filters</Button>
    </Empty>
  );
}

interface ListingProps extends Pick<NodeListProps, "onAct"> {
  matches: readonly LiveNode[];
  filter: Filter;
  selection: Selection;
  /** Pixels of the window's top that are covered. */
  covered: number;
  onFilter: SetFilter;
}

/** The bar on top of every page. */
const TOP_BAR = 48;

const Listing = memo(function Listing({ matches, filter, selection, covered, onFilter, onAct }: ListingProps): ReactNode {
  const navigate = useNavigate();
  const open = useCallback((node: LiveNode) => void navigate(`/app/nodes/${node.id}`), [navigate]);
  const menu = useCallback((node: LiveNode) => <Menu name={`Actions for ${node.name}`} items={menuOf(node, onAct, () => open(node))} />, [onAct, open]);
  const columns = useMemo(() => COLUMNS.filter(({ key }) => filter.columns.includes(key)), [filter.columns]);
  return (
    <DataGrid
      name="Nodes"
      noun="node"
      rows={matches}
      rowId={idOf}
      rowName={nameOf}
      sort={filter.sort}
      onSort={(sort) => onFilter((previous) => ({ ...previous, sort }))}
      dense={filter.dense}
      covered={covered + TOP_BAR}
      onOpen={open}
      {...{ columns, selection, menu }}
    />
  );
});
