// The page of backends, in two views: the catalogue, which is what the galleries offer, on how many nodes each is
// installed and the way to install; and what is installed (`installed.tsx`).
import { useCallback, useDeferredValue, useEffect, useMemo, useState, type ReactNode } from "react";
import { Link, useLocation } from "react-router";
import { count } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import type { Operation } from "../live/messages";
import { SilenceNotice } from "../operations/lines";
import { targetsOf } from "../operations/model";
import { progressTimes } from "../operations/silence";
import { useWork } from "../operations/watch";
import { ENDED } from "../operations/words";
import { Button } from "../ui/button";
import { Command } from "../ui/copy";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import type { Column } from "../ui/rows";
import { Select } from "../ui/select";
import { Table } from "../ui/table";
import { Checkbox } from "../ui/text-field";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import "./backends.css";
import { addressOfSearch, installedOn, runsOn, runsOnText, search, searchIn, summary, useCatalogue, type Catalogue, type Entry } from "./catalogue";
import { BackendLink, Version } from "./cells";
import { InstalledView } from "./installed";
import { InstallPicker } from "./picker";
import { isLoaded, useThrottledNodes } from "./throttled-nodes";
import { byName } from "./runs";

const DRAWN = 60;
const NONE: readonly Operation[] = [];

export function BackendsPage(): ReactNode {
  const [picked, setPicked] = usePicked();
  const installed = new URLSearchParams(useLocation().search).get("view") === "installed";
  const pick = useCallback((name: string) => setPicked(byName(name)), [setPicked]);
  const note = installed ? "Backends on your nodes, their versions, and available updates." : "Backends available from your galleries, and the number of nodes with each one.";
  return (
    <div className="backends">
      <PageHead title="Backends" note={note}>
        <Button onClick={() => setPicked("")}>Install a backend…</Button>
      </PageHead>
      <nav className="row wrap" aria-label="Views of backends">
        <View to="/app/backends" label="Catalogue" isCurrent={!installed} />
        <View to="/app/backends?view=installed" label="Installed" isCurrent={installed} />
      </nav>
      {installed ? <InstalledView /> : <CatalogueView onInstall={pick} />}
      <InstallPicker open={picked !== null} onClose={() => setPicked(null)} {...(picked === null ? {} : { backend: picked })} />
    </div>
  );
}

function View({ to, label, isCurrent }: { to: string; label: string; isCurrent: boolean }): ReactNode {
  return (
    <Link className="button small chip" to={to} {...(isCurrent ? { "aria-current": "page" as const } : {})}>
      {label}
    </Link>
  );
}

function CatalogueView({ onInstall }: { onInstall: (name: string) => void }): ReactNode {
  const catalogue = useCatalogue();
  return (
    <>
      {catalogue.isPending && <Loading subject="the catalogue" />}
      <Problem error={catalogue.error} onRetry={() => void catalogue.refetch()} />
      {catalogue.data !== undefined && <Entries catalogue={catalogue.data} onRetry={() => void catalogue.refetch()} onInstall={onInstall} />}
    </>
  );
}

const LONGEST_NAME = 255;

/** The backend of the open picker, null while it is closed. An address with `install=name` opens it. */
function usePicked(): [string | null, (name: string | null) => void] {
  const { search, key } = useLocation();
  const backendToInstall = new URLSearchParams(search).get("install");
  const [picked, setPicked] = useState<string | null>(null);
  const [adopted, setAdopted] = useState("");
  if (backendToInstall !== null && adopted !== key) {
    setAdopted(key);
    setPicked(backendToInstall.slice(0, LONGEST_NAME));
  }
  useEffect(() => {
    if (backendToInstall !== null) byName(backendToInstall.slice(0, LONGEST_NAME));
  }, [backendToInstall]);
  return [picked, setPicked];
}

interface EntriesProps {
  catalogue: Catalogue;
  onRetry: () => void;
  onInstall: (name: string) => void;
}

function Entries({ catalogue, onRetry, onInstall }: EntriesProps): ReactNode {
  const [{ term, tag }, want] = useInAddress(searchIn, addressOfSearch);
  const [runnable, setRunnable] = useState(false);
  const [builds, setBuilds] = useState(false);
  const [development, setDevelopment] = useState(catalogue.preferDevelopmentBackends);
  const settled = useDeferredValue(term);
  const matches = useMemo(
    () => search(catalogue.backends, { term: settled, builds, development, tag, runnable }),
    [catalogue, settled, builds, development, tag, runnable],
  );
  if (catalogue.backends.length === 0) return <NoGallery catalogue={catalogue} onRetry={onRetry} />;
  return (
    <>
      <GalleryTroubles catalogue={catalogue} onRetry={onRetry} />
      <div className="row wrap">
        <input
          className="input picker-filter"
          type="search"
          aria-label="Search backends"
          placeholder="Name, description or tag"
          value={term}
          onChange={(event) => want({ term: event.target.value, tag })}
        />
        {catalogue.allTags.length > 0 && (
          <Select label="Tag" labelled="hidden" value={tag} options={[["", "All tags"], ...catalogue.allTags.map((allTag) => [allTag, allTag] as const)]} onChange={(next) => want({ term, tag: next })} />
        )}
        <Checkbox label="Runs on your nodes" on={runnable} onChange={setRunnable} />
        <Checkbox label="Hardware-specific builds" on={builds} onChange={setBuilds} />
        <Checkbox label="Pre-release builds" on={development} onChange={setDevelopment} />
        <span className="muted">
          {matches.length} of {catalogue.backends.length} shown
        </span>
      </div>
      {matches.length === 0 ? (
        <Empty title="No matching backends">
          <Button
            onClick={() => {
              want({ term: "", tag: "" });
              setRunnable(false);
            }}
          >
            Show all
          </Button>
        </Empty>
      ) : (
        <List entries={matches} capabilities={catalogue.nodesByCapability} onInstall={onInstall} />
      )}
    </>
  );
}

interface ListProps {
  entries: readonly Entry[];
  capabilities: Catalogue["nodesByCapability"];
  onInstall: (name: string) => void;
}

function List({ entries, capabilities, onInstall }: ListProps): ReactNode {
  const nodes = useThrottledNodes();
  const { groups } = useWork();
  const installed = useMemo(() => (isLoaded(nodes) ? installedOn(nodes.values()) : null), [nodes]);
  const running = useMemo(
    () => new Map(groups.filter((group) => group.kind === "backend_install" && group.active.length > 0).map((group) => [group.name, group.active])),
    [groups],
  );
  const columns = useMemo(
    (): readonly Column<Entry>[] => [
      { key: "backend", title: "Backend", value: nameOf, cell: (entry) => <Name entry={entry} /> },
      { key: "version", title: "Version", value: ({ version }) => version || null, cell: ({ version }) => <Version version={version} digest="" /> },
      { key: "license", title: "Licence", value: ({ license }) => license || null, cell: ({ license }) => (license === "" ? "–" : <bdi>{license}</bdi>) },
      { key: "able", title: "Runs on", largestFirst: true, value: (entry) => runsOn(entry, capabilities).able, cell: (entry) => <span className="muted">{runsOnText(runsOn(entry, capabilities))}</span> },
      {
        key: "count",
        title: "Installed",
        largestFirst: true,
        value: ({ name }) => installed?.get(name.toLowerCase()) ?? 0,
        cell: ({ name }) => <InstalledOn on={installed === null ? null : (installed.get(name.toLowerCase()) ?? 0)} running={running.get(name) ?? NONE} />,
      },
      {
        key: "actions",
        title: "Actions",
        cell: ({ name }) => (
          <Button small aria-label={`Install ${name}…`} onClick={() => onInstall(name)}>
            Install…
          </Button>
        ),
      },
    ],
    [capabilities, installed, running, onInstall],
  );
  return (
    <div className="table-scroll">
      <Table name="Catalogue" className="backend-table" columns={columns} rows={entries} rowId={({ id }) => id} rowName={nameOf} first={DRAWN} />
    </div>
  );
}

const nameOf = ({ name }: Entry) => name;

function Name({ entry }: { entry: Entry }): ReactNode {
  const text = summary(entry.description);
  return (
    <>
      <div className="row wrap">
        <BackendLink name={entry.name} />
        {entry.isAlias && <span className="tag">build</span>}
        {entry.isDevelopment && <span className="tag">pre-release</span>}
      </div>
      {text !== "" && (
        <p className="name muted" title={text}>
          {text}
        </p>
      )}
    </>
  );
}

interface InstalledOnProps {
  /** On how many nodes it is installed, null while that is not known. */
  on: number | null;
  running: readonly Operation[];
}

function InstalledOn({ on, running }: InstalledOnProps): ReactNode {
  const onNodes = running.flatMap(targetsOf).filter((target) => !ENDED.has(target.status)).length;
  return (
    <div className="row wrap">
      {onNodes > 0 && (
        <Link className="pill info" to="/app/activity?show=backends">
          installing on {count(onNodes, "node")}
        </Link>
      )}
      {onNodes > 0 && <SilenceNotice of={progressTimes(running)} />}
      {on !== null && <span className={on > 0 ? "" : "muted"}>{on > 0 ? `on ${count(on, "node")}` : "not installed"}</span>}
    </div>
  );
}

/** A gallery that could not be read, with what can be done about it. */
function GalleryTroubles({ catalogue, onRetry }: { catalogue: Catalogue; onRetry: () => void }): ReactNode {
  return catalogue.galleryErrors.map((trouble) => (
    <div key={trouble.name} className="stack">
      <Problem error={new Error(`Gallery ${trouble.name}: ${trouble.error}`)} onRetry={onRetry} />
      {trouble.readAt !== undefined && (
        <p className="muted">
          The entries shown are from <Ago at={trouble.readAt} />.
        </p>
      )}
    </div>
  ));
}

const EXAMPLE = `LOCALAI_BACKEND_GALLERIES='[{"name": "mine", "url": "file:///etc/localai/backends.yaml"}]'`;

function NoGallery({ catalogue, onRetry }: { catalogue: Catalogue; onRetry: () => void }): ReactNode {
  return (
    <>
      <GalleryTroubles catalogue={catalogue} onRetry={onRetry} />
      <Empty title={catalogue.repositories.length === 0 ? "No gallery is configured" : "The galleries are empty"}>
        <p>
          Workers have their own galleries, which “Install a backend…” uses. To list backends here, set this variable for the web process and the controllers, and restart them:
        </p>
        <Command text={EXAMPLE} />
      </Empty>
    </>
  );
}
