// The install picker: one backend, some nodes, and what will happen on each before anything is pressed. After the
// press each row turns by the server's word only. It can be closed at any time: nothing stops and nothing is lost.
import { useCallback, useEffect, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { count, span } from "../lib/format";
import { useLive, useNow } from "../live/hooks";
import { Button } from "../ui/button";
import { Dialog } from "../ui/dialog";
import { Empty, Loading } from "../ui/empty";
import { useSelection, type Selection } from "../ui/rows";
import { Checkbox } from "../ui/text-field";
import "./backends.css";
import { useCatalogue } from "./catalogue";
import { ChooseBackend } from "./choose-backend";
import { matches, plain, tally } from "./picker-model";
import { listedRows, useRows, type Row } from "./picker-rows";
import { NodeTable, NotListed } from "./picker-table";
import { isLoaded, useThrottledNodes, type NodesById } from "./throttled-nodes";
import { addressOf, byAddress, byName, runs } from "./runs";
import { ONE_BY_ONE, WaveFields, waveProblem, wavesOf, type WaveChoice } from "./wave-fields";

export interface InstallPickerProps {
  open?: boolean;
  onClose: () => void;
  /** Chosen to begin with. */
  backend?: string;
  /** Selected to begin with. */
  nodeIds?: readonly string[];
}

export function InstallPicker({ open = true, onClose, backend = "", nodeIds = [] }: InstallPickerProps): ReactNode {
  const [chosen, setChosen] = useState<string | null>(null);
  const name = chosen ?? backend;
  const close = () => {
    setChosen(null);
    onClose();
  };
  const title = name === "" ? "Install a backend" : <>Install <bdi>{plain(name)}</bdi></>;
  return (
    <Dialog open={open} onClose={close} wide title={title} description={<BackendSummary backend={name} onChange={() => setChosen("")} />}>
      {name === "" ? (
        <ChooseBackend onChoose={(name) => setChosen(byName(name))} onAddress={(address) => setChosen(byAddress(address))} />
      ) : (
        <PickNodes key={name} backend={name} nodeIds={nodeIds} start={chosen !== null} onClose={close} />
      )}
    </Dialog>
  );
}

function BackendSummary({ backend, onChange }: { backend: string; onChange: () => void }): ReactNode {
  const catalogue = useCatalogue();
  if (backend === "") return "Choose a backend, then the nodes.";
  const from = addressOf(backend);
  const entry = catalogue.data?.backends.find((candidate) => candidate.name === plain(backend));
  return (
    <div className="row wrap">
      {from !== undefined && (
        <span>
          from <bdi>{from.uri}</bdi>
        </span>
      )}
      {from === undefined && entry !== undefined && <span className="tag">{entry.isMeta ? "Selects the build for each node" : "Universal build"}</span>}
      {from === undefined && entry !== undefined && !entry.isMeta && entry.isAlias && (
        <span className="hardware-warning">{entry.name} is a build for specific hardware. It may not run on other nodes.</span>
      )}
      <Button small onClick={onChange}>
        Choose another
      </Button>
    </div>
  );
}

function PickNodes(props: PickNodesProps): ReactNode {
  const nodes = useThrottledNodes();
  return isLoaded(nodes) ? <Pick {...props} nodes={nodes} /> : <Loading subject="nodes" />;
}

interface PickNodesProps {
  backend: string;
  nodeIds: readonly string[];
  /** True if the filter gets the focus, after the list of backends. */
  start: boolean;
  onClose: () => void;
}

function Pick({ backend, nodeIds, start, onClose, nodes }: PickNodesProps & { nodes: NodesById }): ReactNode {
  const rows = useRows(backend, nodes);
  const selection = useSelection(nodeIds);
  const selected = selection.ids;
  const [filter, setFilter] = useState("");
  const [draining, setDraining] = useState(false);
  const [waveChoice, setWaveChoice] = useState({ ...ONE_BY_ONE, inWaves: false });
  useForgetDone(backend, rows);
  const chosen = rows.filter((row) => row.open && selected.has(row.node.id));
  const listed = listedRows(rows, { requested: new Set(nodeIds), selected, draining }).filter((row) => row.mine || matches(row.node, filter));
  const hidden = chosen.filter((row) => !listed.includes(row)).length;
  const { others, send } = useInstall(backend, selection, waveChoice);
  const retry = useCallback((id: string) => void runs.start(backend, [id]), [backend]);
  if (rows.length === 0) return <NoNodes />;
  const healthy = listed.filter((row) => row.open && row.node.status === "healthy").map((row) => row.node.id);
  return (
    <>
      <div className="row wrap">
        <NameFilter value={filter} onChange={setFilter} autoFocus={start} />
        <Button small refusal={healthy.length === 0 ? "Already installed on every healthy node" : ""} onClick={() => selection.toggle(healthy.filter((id) => !selected.has(id)))}>
          Select all healthy
        </Button>
        <Button small refusal={selected.size === 0 ? "No nodes selected" : ""} onClick={selection.clear}>
          Clear
        </Button>
        <DrainingBox rows={rows} on={draining} onChange={setDraining} />
      </div>
      {listed.length === 0 ? <p className="muted">No matching nodes.</p> : <NodeTable rows={listed} selection={selection} onRetry={retry} />}
      <NotListed pending={rows.filter((row) => row.node.status === "pending" && !nodeIds.includes(row.node.id)).length} />
      {chosen.length > 1 && <Waves choice={waveChoice} onChange={setWaveChoice} />}
      <Others number={others.length} />
      <Footer
        rows={rows}
        chosen={chosen}
        hidden={hidden}
        problem={chosen.length > 1 ? waveProblem(waveChoice) : ""}
        onInstall={() => void send(chosen.map((row) => row.node.id))}
        onRetry={(ids) => void send(ids)}
        onClose={onClose}
      />
    </>
  );
}

/** `others`: the nodes that are left of a request of which the server has refused some. */
function useInstall(backend: string, selection: Selection, waveChoice: WaveChoice): { others: readonly string[]; send: (ids: readonly string[]) => Promise<void> } {
  const [others, setOthers] = useState<readonly string[]>([]);
  const send = async (ids: readonly string[]) => {
    selection.toggle(ids.filter((id) => selection.ids.has(id)));
    const remaining = await runs.start(backend, ids, ids.length > 1 ? wavesOf(waveChoice) : null);
    setOthers(remaining);
    if (remaining.length > 0) selection.toggle(remaining);
  };
  return { others, send };
}

function Others({ number }: { number: number }): ReactNode {
  if (number === 0) return null;
  return (
    <p className="problem" role="alert">
      Nothing has started: some nodes cannot install this backend. Their rows show why. The other {count(number, "node")} {number === 1 ? "is" : "are"} still selected.
    </p>
  );
}

function NameFilter({ value, onChange, autoFocus }: { value: string; onChange: (text: string) => void; autoFocus: boolean }): ReactNode {
  return (
    <input
      className="input picker-filter"
      type="search"
      aria-label="Filter nodes by name or key=value"
      placeholder="Name or key=value"
      autoFocus={autoFocus}
      value={value}
      onChange={(event) => onChange(event.target.value)}
    />
  );
}

function Waves({ choice, onChange }: { choice: WaveChoice; onChange: (choice: WaveChoice) => void }): ReactNode {
  return (
    <details className="picker-waves">
      <summary>{choice.inWaves ? `In waves, ${choice.atOnce} at a time` : "All at once"}</summary>
      <WaveFields choice={choice} onChange={onChange} inWaves="In waves: the next nodes start when the previous ones have finished." atOnce="All at once." />
    </details>
  );
}

/** Successful requests have been seen when the dialog is closed; reopened, it starts over. */
function useForgetDone(backend: string, rows: readonly Row[]): void {
  const [first] = useState(() => rows.filter((row) => row.progress?.ended === "well").map((row) => row.node.id));
  useEffect(() => runs.forget(backend, first), [backend, first]);
}

function DrainingBox({ rows, on, onChange }: { rows: readonly Row[]; on: boolean; onChange: (on: boolean) => void }): ReactNode {
  const number = rows.filter((row) => row.node.status === "draining").length;
  return number === 0 ? null : <Checkbox label={`Show ${number} draining`} on={on} onChange={onChange} />;
}

function NoNodes(): ReactNode {
  return (
    <Empty title="No nodes available">
      <p>Backends run on workers. Add a machine, then approve its worker.</p>
      <Link className="button" to="/app/nodes">
        Add a node
      </Link>
    </Empty>
  );
}

interface FooterProps {
  rows: readonly Row[];
  chosen: readonly Row[];
  /** The number of those that the filter hides. */
  hidden: number;
  /** Why the waves cannot be as they are typed; "" if they can. */
  problem: string;
  onInstall: () => void;
  onRetry: (ids: readonly string[]) => void;
  onClose: () => void;
}

function Footer({ rows, chosen, hidden, problem, onInstall, onRetry, onClose }: FooterProps): ReactNode {
  const progress = rows.flatMap((row) => (row.progress === null ? [] : [row.progress]));
  const failed = rows.filter((row) => row.progress?.ended === "badly").map((row) => row.node.id);
  const isRunning = progress.some((progress) => progress.ended === "no");
  return (
    <div className="picker-footer">
      <div className="picker-said">
        {progress.length > 0 && <strong data-testid="picker-tally">{tally(progress)}</strong>} {chosen.length > 0 && <span>{plan(chosen)}{hidden > 0 && ` (${hidden} hidden by the filter)`}</span>}
        <Stale />
      </div>
      {failed.length > 0 && <Button onClick={() => onRetry(failed)}>Retry failed ({failed.length})</Button>}
      <Button onClick={onClose}>{isRunning ? "Continue in background" : "Close"}</Button>
      <Button kind={isRunning && chosen.length === 0 ? "plain" : "primary"} refusal={chosen.length === 0 ? "Select at least one node" : problem} onClick={onInstall}>
        {chosen.length === 0 ? (isRunning ? "Install on more nodes" : "Install") : `Install on ${count(chosen.length, "node")}`}
      </Button>
    </div>
  );
}

/** "2 selected", or "3 selected: 2 now, 1 when the node is online" if they differ. */
function plan(chosen: readonly Row[]): string {
  const of = (kind: string) => chosen.filter((row) => row.expected.kind === kind).length;
  const parts = [
    [of("install"), "now"],
    [of("joins"), "in progress already"],
    [of("waits"), of("waits") === 1 ? "when the node is online" : "when the nodes are online"],
  ] as const;
  if (of("install") === chosen.length) return `${chosen.length} selected`;
  const summary = parts.filter(([number]) => number > 0).map(([number, words]) => `${number} ${words}`);
  return `${chosen.length} selected: ${summary.join(", ")}`;
}

/** While the feed is cut the rows stand still; installs do not. */
function Stale(): ReactNode {
  const since = useLive((state) => (state.connection === "live" ? null : state.staleSince));
  const skew = useLive((state) => state.skew);
  const now = useNow(1000) - skew;
  if (since === null) return null;
  return <p className="muted">Connection lost. Last update: {span(Math.max(0, now - since) / 1000)} ago. Installs continue.</p>;
}
