// The view of installed backends: what is where, in which version, what differs, and what can be upgraded. Live: the
// lists are read again when the feed says that they have changed.
import { useDeferredValue, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { bytes, count } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { useLive } from "../live/hooks";
import type { LiveNode } from "../live/messages";
import { useWork } from "../operations/watch";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { Checkbox } from "../ui/text-field";
import { Ago } from "../ui/time";
import { useCatalogue } from "./catalogue";
import type { Verb } from "./installed-calls";
import { ChangeDialog, type Change } from "./installed-dialog";
import { checkForUpgrades, useInstalled, type InstalledData } from "./installed-data";
import { BackendLink, Marks, Version, WorkPills, workOn } from "./cells";
import { filterAddress, FROM_ADDRESS, outdated, rowsOf, shownRows, STATES, tallies, parseFilter, type Place, type Row, type State, type InstalledFilter } from "./installed-model";
import { isLoaded, useThrottledNodes } from "./throttled-nodes";

const DRAWN = 60;
const LABEL: Readonly<Record<State, string>> = { all: "All", user: "User", system: "System", updates: "Updates", offline: "Offline nodes" };

export function InstalledView(): ReactNode {
  const data = useInstalled();
  const nodes = useThrottledNodes();
  return (
    <>
      <Check />
      {(data.isPending || !isLoaded(nodes)) && data.error === null && <Loading subject="the installed backends" />}
      <Problem error={data.error} onRetry={() => void data.refetch()} />
      {data.data !== undefined && isLoaded(nodes) && <Rows data={data.data} />}
    </>
  );
}

/** When the galleries were compared last, what could not be read, and the way to do it now. */
function Check(): ReactNode {
  const backendsMessage = useLive((state) => state.backends);
  const check = useAction(checkForUpgrades);
  const checking = backendsMessage?.checking === true;
  return (
    <div className="stack">
      <div className="row wrap">
        <Button small busy={check.busy || checking} onClick={() => check.run()}>
          Check for updates
        </Button>
        <span className="muted" role="status">
          {checking ? "Checking the galleries…" : backendsMessage?.checked_at == null ? "Not checked yet" : <>Checked <Ago at={backendsMessage.checked_at} /></>}
        </span>
      </div>
      <Problem error={check.error} onDismiss={check.forget} />
      {Object.entries(backendsMessage?.problems ?? {}).map(([gallery, why]) => (
        <Problem key={gallery} error={new Error(gallery === "" ? `Check failed: ${why}.` : `Gallery ${gallery}: ${why}`)} />
      ))}
    </div>
  );
}

function Rows({ data }: { data: InstalledData }): ReactNode {
  const nodes = useThrottledNodes();
  const catalogue = useCatalogue();
  const [filter, setFilter] = useInAddress(parseFilter, filterAddress);
  const [openChange, setOpenChange] = useState<Change | null>(null);
  const entries = catalogue.data?.backends;
  const rows = useMemo(() => rowsOf(data.installed, data.upgrades, entries ?? [], nodes), [data, entries, nodes]);
  const settled = useDeferredValue(filter);
  const shown = useMemo(() => shownRows(rows, settled), [rows, settled]);
  const columns = useMemo(() => columnsOf(setOpenChange), []);
  if (rows.length === 0) {
    return (
      <Empty title="No backends installed">
        <p>Install a backend from the catalogue. Loading a model also installs the backend that it needs.</p>
        <Link className="button" to="/app/backends">
          Open the catalogue
        </Link>
      </Empty>
    );
  }
  return (
    <>
      <Updates rows={rows} onChange={setOpenChange} />
      <Filter rows={rows} shown={shown.length} filter={filter} onChange={setFilter} />
      {shown.length === 0 ? (
        <Empty title="No matching backends">
          <Button onClick={() => setFilter({ ...filter, term: "", state: "all", variants: true, development: true })}>Clear filters</Button>
        </Empty>
      ) : (
        <div className="table-scroll">
          <Table name="Installed backends" className="backend-table" columns={columns} rows={shown} rowId={nameOf} rowName={nameOf} first={DRAWN} />
        </div>
      )}
      {openChange !== null && <ChangeDialog change={openChange} onClose={() => setOpenChange(null)} />}
    </>
  );
}

const nameOf = ({ name }: Row) => name;

function columnsOf(onChange: (change: Change) => void): readonly Column<Row>[] {
  return [
    {
      key: "backend",
      title: "Backend",
      value: nameOf,
      cell: (row) => (
        <div className="row wrap">
          <BackendLink name={row.name} />
          <Marks row={row} />
        </div>
      ),
    },
    { key: "version", title: "Version", value: ({ version }) => version || null, cell: ({ version, digest }) => <Version version={version} digest={digest} /> },
    { key: "count", title: "Nodes", numeric: true, largestFirst: true, value: ({ places }) => places.length, cell: ({ places }) => count(places.length, "node") },
    { key: "size", title: "Size", numeric: true, largestFirst: true, value: ({ places }) => largest(places) || null, cell: ({ places }) => (largest(places) > 0 ? bytes(largest(places)) : "–") },
    {
      key: "work",
      title: "Operations",
      cell: ({ name }) => <RowWork name={name} />,
    },
    { key: "actions", title: "Actions", cell: (row) => <Actions row={row} onChange={onChange} /> },
  ];
}

/** What goes on with a backend: operations change often, and the columns stay. */
function RowWork({ name }: { name: string }): ReactNode {
  const { operations } = useWork();
  return (
    <div className="row wrap">
      <WorkPills operations={workOn([...operations.values()].filter((operation) => operation.isBackend), name)} name={name} />
    </div>
  );
}

function largest(places: readonly Place[]): number {
  return Math.max(0, ...places.map(({ size }) => size));
}

function Actions({ row, onChange }: { row: Row; onChange: (change: Change) => void }): ReactNode {
  if (row.isSystem) return <span className="tag">Protected</span>;
  const nodes = row.places.map(({ node }) => node);
  const open = (verb: Verb, usual: readonly LiveNode[]) => onChange({ verb, backends: [{ name: row.name, nodes: usual }] });
  return (
    <div className="row wrap">
      {row.upgrade !== null && (
        <Button small kind="primary" aria-label={`Upgrade ${row.name}…`} onClick={() => open("upgrade", outdated(row))}>
          Upgrade…
        </Button>
      )}
      <Button small aria-label={`Reinstall ${row.name}…`} refusal={row.byAddress ? FROM_ADDRESS : ""} onClick={() => open("reinstall", nodes)}>
        Reinstall…
      </Button>
      <Button small aria-label={`Delete ${row.name}…`} onClick={() => open("delete", nodes)}>
        Delete…
      </Button>
    </div>
  );
}

/** All upgrades at once. */
function Updates({ rows, onChange }: { rows: readonly Row[]; onChange: (change: Change) => void }): ReactNode {
  const old = rows.filter((row) => row.upgrade !== null && !row.isSystem);
  if (old.length === 0) return null;
  const backends = old.map((row) => ({ name: row.name, nodes: outdated(row) }));
  return (
    <div className="updates-notice row wrap">
      <strong className="grow">{count(old.length, "update")} available</strong>
      <Button small onClick={() => onChange({ verb: "upgrade", backends })}>
        Upgrade all…
      </Button>
    </div>
  );
}

interface FilterProps {
  rows: readonly Row[];
  shown: number;
  filter: InstalledFilter;
  onChange: (filter: InstalledFilter) => void;
}

function Filter({ rows, shown, filter, onChange }: FilterProps): ReactNode {
  const numbers = tallies(rows);
  const [variants, development] = [rows.filter((row) => row.isVariant).length, rows.filter((row) => row.isDevelopment).length];
  const offered = STATES.filter((state) => state === filter.state || numbers[state] > 0 || !["updates", "offline"].includes(state));
  return (
    <>
      <div className="row wrap" role="group" aria-label="Show">
        {offered.map((state) => (
          <Button key={state} small className="chip" aria-pressed={state === filter.state} onClick={() => onChange({ ...filter, state })}>
            {LABEL[state]} ({numbers[state]})
          </Button>
        ))}
      </div>
      <div className="row wrap">
        <input
          className="input picker-filter"
          type="search"
          aria-label="Search installed backends"
          placeholder="Name"
          value={filter.term}
          onChange={(event) => onChange({ ...filter, term: event.target.value })}
        />
        <Checkbox label={`Builds (${variants})`} on={filter.variants} onChange={(on) => onChange({ ...filter, variants: on })} />
        <Checkbox label={`Pre-release builds (${development})`} on={filter.development} onChange={(on) => onChange({ ...filter, development: on })} />
        <span className="muted">
          {shown} of {rows.length} shown
        </span>
      </div>
    </>
  );
}
