// The page of one backend: what it is, what the galleries offer, the nodes that have it, and the work on it.
import { useMemo, useState, type ReactNode } from "react";
import { Link, useParams } from "react-router";
import { bytes, count } from "../lib/format";
import type { LiveNode, Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { Panel } from "../nodes/detail/panel";
import { Fact } from "../nodes/shared/identity";
import { useWork } from "../operations/watch";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import { Menu } from "../ui/menu";
import { Problem } from "../ui/problem";
import { useSelection, type Column, type Selection } from "../ui/rows";
import { StatusPill } from "../ui/status";
import { Table } from "../ui/table";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import "../nodes/detail/detail.css";
import "./backends.css";
import { runsOn, summary, useCatalogue, type Catalogue, type Entry, type Runs } from "./catalogue";
import { BackendLink, Failure, FromAddress, Marks, Version, WorkPills, workOn } from "./cells";
import type { Verb } from "./installed-calls";
import { useInstalled, type InstalledData } from "./installed-data";
import { ChangeDialog, type Change } from "./installed-dialog";
import { FROM_ADDRESS, outdated, rowsOf, target, versionText, type Place, type Row } from "./installed-model";
import { InstallPicker } from "./picker";
import { byName } from "./runs";
import { isLoaded, useThrottledNodes, type NodesById } from "./throttled-nodes";

/** A backend may be on a thousand nodes. */
const NODES_FIRST = 100;

export function BackendPage(): ReactNode {
  const name = useParams()["name"] ?? "";
  return <OneBackend key={name} name={name} />;
}

interface Found {
  name: string;
  /** Undefined while no node is known to have it. */
  row: Row | undefined;
  /** One for each gallery that lists it. */
  offers: readonly Entry[];
  /** Operations that are under way or have failed. */
  work: readonly Operation[];
  capabilities: Catalogue["nodesByCapability"];
}

function OneBackend({ name }: { name: string }): ReactNode {
  const installed = useInstalled();
  const catalogue = useCatalogue();
  const nodes = useThrottledNodes();
  const found = useFound(name, installed.data, catalogue.data, nodes);
  const isWaiting = (installed.isPending || !isLoaded(nodes)) && installed.error === null;
  const isUnknown = !isWaiting && catalogue.data !== undefined && installed.error === null && isNowhere(found);
  return (
    <div className="backends">
      <nav aria-label="Back">
        <Link to={found.row === undefined ? "/app/backends" : "/app/backends?view=installed"}>← All backends</Link>
      </nav>
      <Shown {...found} />
      {isWaiting && <Loading subject="the backend" />}
      <Problem error={installed.error} onRetry={() => void installed.refetch()} />
      <Problem error={catalogue.error} onRetry={() => void catalogue.refetch()} />
      {isUnknown && (
        <Empty title="This backend is not on any node or in any gallery.">
          <Link className="button" to="/app/backends">
            Show all backends
          </Link>
        </Empty>
      )}
    </div>
  );
}

const NO_ENTRIES: readonly Entry[] = [];

function useFound(name: string, installed: InstalledData | undefined, catalogue: Catalogue | undefined, nodes: NodesById): Found {
  const { operations } = useWork();
  const entries = catalogue?.backends ?? NO_ENTRIES;
  const isName = (other: string) => other.toLowerCase() === name.toLowerCase();
  const rows = useMemo(() => (installed === undefined ? [] : rowsOf(installed.installed, installed.upgrades, entries, nodes)), [installed, entries, nodes]);
  const row = rows.find((candidate) => isName(candidate.name));
  const offers = entries.filter((entry) => isName(entry.name));
  return { name: row?.name ?? offers[0]?.name ?? name, row, offers, work: workOn(operations.values(), name), capabilities: catalogue?.nodesByCapability ?? {} };
}

function isNowhere({ row, offers, work }: Found): boolean {
  return row === undefined && offers.length + work.length === 0;
}

function Shown({ name, row, offers, work, capabilities }: Found): ReactNode {
  const selection = useSelection();
  const [openChange, setOpenChange] = useState<Change | null>(null);
  const [installing, setInstalling] = useState(false);
  const [offer] = offers;
  const places = row?.places ?? [];
  const chosen = places.filter(({ node }) => selection.ids.has(node.id)).map(({ node }) => node);
  const refusal = lostSelection(selection, chosen);
  const change = (verb: Verb, usual: readonly LiveNode[]) => setOpenChange({ verb, backends: [{ name, nodes: chosen.length > 0 ? chosen : usual }] });
  const install = () => {
    byName(name);
    setInstalling(true);
  };
  return (
    <>
      <PageHead title={name} named {...(offer === undefined ? {} : { note: summary(offer.description) })}>
        {row?.isSystem === false && <Changes name={name} row={row} refusal={refusal} onChange={change} />}
        {offer !== undefined && (
          <Button kind={row === undefined ? "primary" : "plain"} onClick={install}>
            Install…
          </Button>
        )}
      </PageHead>
      {work.length > 0 && <Work name={name} operations={work} />}
      {(row ?? offer) !== undefined && <Facts row={row} offers={offers} />}
      {row !== undefined && <Places name={name} row={row} selection={selection} chosen={chosen.length} />}
      {offer !== undefined && <Compatible offer={offer} capabilities={capabilities} />}
      {openChange !== null && <ChangeDialog change={openChange} onClose={() => setOpenChange(null)} />}
      <InstallPicker open={installing} onClose={() => setInstalling(false)} backend={name} />
    </>
  );
}

interface PlacesProps {
  name: string;
  row: Row;
  selection: Selection;
  /** The number of selected nodes. */
  chosen: number;
}

function Places({ name, row, selection, chosen }: PlacesProps): ReactNode {
  const scope = selection.ids.size === 0 ? "Actions apply to all nodes. Select nodes to limit them" : `Actions apply to ${count(chosen, "selected node")}`;
  return (
    <Panel title="Nodes" aside={!row.isSystem && <span className="muted">{scope}</span>}>
      <div className="table-scroll">
        <Table
          name={`Nodes with ${name}`}
          columns={PLACES}
          rows={row.places}
          rowId={({ node }) => node.id}
          rowName={({ node }) => node.name}
          first={NODES_FIRST}
          alike={samePlace}
          {...(row.isSystem ? {} : { selection })}
        />
      </div>
    </Panel>
  );
}

/** The actions stay those of the selection when what was selected goes: a press must not act on all instead. */
function lostSelection({ ids }: Selection, chosen: readonly LiveNode[]): string {
  return ids.size > 0 && chosen.length === 0 ? "The selected nodes no longer have it" : "";
}

interface ChangesProps {
  name: string;
  row: Row;
  /** Why no action is possible now; "" if there is no such reason. */
  refusal: string;
  onChange: (verb: Verb, usual: readonly LiveNode[]) => void;
}

function Changes({ name, row, refusal, onChange }: ChangesProps): ReactNode {
  const nodes = row.places.map(({ node }) => node);
  return (
    <>
      {row.upgrade !== null && (
        <Button kind="primary" refusal={refusal} onClick={() => onChange("upgrade", outdated(row))}>
          Upgrade…
        </Button>
      )}
      <Menu
        name={`More actions for ${name}`}
        items={[
          { label: "Reinstall…", refusal: row.byAddress ? FROM_ADDRESS : refusal, onSelect: () => onChange("reinstall", nodes) },
          { label: "Delete…", danger: true, refusal, onSelect: () => onChange("delete", nodes) },
        ]}
      />
    </>
  );
}

function Work({ name, operations }: { name: string; operations: readonly Operation[] }): ReactNode {
  return (
    <Panel title="Operations" aside={<Link to="/app/activity?show=backends">Activity</Link>}>
      <div className="row wrap">
        <WorkPills operations={operations.filter(isActive)} name={name} />
      </div>
      {operations.filter(needsAttention).map((operation) => (
        <Failure key={operation.jobID} operation={operation} name={name} />
      ))}
    </Panel>
  );
}

function Facts({ row, offers }: { row: Row | undefined; offers: readonly Entry[] }): ReactNode {
  const [offer] = offers;
  const facts: readonly (readonly [name: string, value: ReactNode])[] = [
    ["Installed", row !== undefined && <Version version={row.version} digest={row.digest} />],
    ["Available", row?.upgrade != null ? target(row.upgrade) || "another build" : each(offers.map(({ version }) => versionText(version)))],
    ["Size", row !== undefined && sizes(row.places)],
    ["Licence", each(offers.map(({ license }) => license))],
    ["Gallery", each(offers.map(({ gallery }) => gallery))],
    ["Source", row?.source],
    ["Aliases", row !== undefined && each(row.places.map(({ alias }) => alias))],
    ["Kind", offer !== undefined && (offer.isMeta ? "selects the build for each node" : offer.isAlias ? "build for specific hardware" : "universal build")],
    ["Selected by", offer !== undefined && offer.metaBackendFor !== "" && <BackendLink name={offer.metaBackendFor} />],
    ["Tags", each(offers.flatMap(({ tags }) => tags))],
  ];
  return (
    <Panel title="Backend" aside={row !== undefined && <span className="row wrap"><Marks row={row} /></span>}>
      <dl className="facts">
        {facts.map(
          ([name, value]) =>
            Boolean(value) && (
              <Fact key={name} name={name}>
                <bdi>{value}</bdi>
              </Fact>
            ),
        )}
        {offer?.urls.map((url) => (
          <Fact key={url} name="Website">
            <ExternalLink url={url} />
          </Fact>
        ))}
      </dl>
    </Panel>
  );
}

/** Its address is text from a gallery: only the web's own schemes become a link. */
function ExternalLink({ url }: { url: string }): ReactNode {
  if (!/^https?:\/\//.test(url)) return <bdi>{url}</bdi>;
  return (
    <a href={url} target="_blank" rel="noreferrer">
      <bdi>{url}</bdi>
    </a>
  );
}

/** The different texts of these. */
function each(texts: readonly string[]): string {
  return [...new Set(texts.filter(Boolean))].join(", ");
}

/** "1.2 GiB", "1.1 GiB to 1.2 GiB"; "" if no worker reports it. */
export function sizes(places: readonly Pick<Place, "size">[]): string {
  const known = places.map(({ size }) => size).filter((size) => size > 0);
  if (known.length === 0) return "";
  return [...new Set([bytes(Math.min(...known)), bytes(Math.max(...known))])].join(" to ");
}

function samePlace(before: Place, after: Place): boolean {
  return (
    before.node.id === after.node.id && before.node.status === after.node.status && before.version === after.version && before.digest === after.digest &&
    before.differs === after.differs && before.fromAddress === after.fromAddress && before.size === after.size && before.installedAt === after.installedAt
  );
}

const PLACES: readonly Column<Place>[] = [
  {
    key: "node",
    title: "Node",
    value: ({ node }) => node.name,
    cell: ({ node }) => (
      <Link to={`/app/nodes/${node.id}/backends`}>
        <bdi>{node.name}</bdi>
      </Link>
    ),
  },
  { key: "state", title: "State", value: ({ node }) => node.status, cell: ({ node }) => <StatusPill status={node.status} /> },
  {
    key: "version",
    title: "Version",
    value: ({ version }) => version || null,
    cell: ({ version, digest, differs, fromAddress }) => (
      <div className="row wrap">
        <span>
          <Version version={version} digest={digest} />
        </span>{" "}
        {differs && <span className="pill warn">differs</span>}
        {fromAddress && <FromAddress />}
      </div>
    ),
  },
  { key: "size", title: "Size", numeric: true, largestFirst: true, value: ({ size }) => size || null, cell: ({ size }) => (size > 0 ? bytes(size) : "–") },
  { key: "installed", title: "Installed", value: ({ installedAt }) => installedAt || null, cell: ({ installedAt }) => (installedAt === "" ? "–" : <Ago at={installedAt} />) },
];

/** The build that each kind of node installs, and why. */
function Compatible({ offer, capabilities }: { offer: Entry; capabilities: Catalogue["nodesByCapability"] }): ReactNode {
  const { kinds, able, total } = runsOn(offer, capabilities);
  return (
    <Panel title="Compatible nodes" aside={<span className="muted">{`${able} of ${count(total, "node")}`}</span>}>
      {kinds.length === 0 ? (
        <p className="muted">No healthy node can run this backend.</p>
      ) : (
        <div className="table-scroll">
          <Table name="Compatible nodes" columns={KINDS} rows={kinds} rowId={({ capability }) => capability} rowName={({ capability }) => capability} />
        </div>
      )}
    </Panel>
  );
}

const KINDS: readonly Column<Runs>[] = [
  { key: "capability", title: "Capability", value: ({ capability }) => capability, cell: ({ capability }) => <bdi>{capability}</bdi> },
  { key: "count", title: "Nodes", numeric: true, largestFirst: true, value: ({ nodes }) => nodes, cell: ({ nodes }) => nodes },
  { key: "build", title: "Build", value: ({ build }) => build, cell: ({ build }) => <BackendLink name={build} /> },
  { key: "why", title: "Reason", cell: ({ reason }) => <span className="muted">{reason}</span> },
];
