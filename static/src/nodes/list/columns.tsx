// The columns of the nodes. Only the age of the last heartbeat keeps state.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { gpuWords, usedRam, usedVram, vramLimit } from "../../live/gpus";
import type { LiveModel, LiveNode } from "../../live/messages";
import { ago, count, exact } from "../../lib/format";
import { ProgressBar, Meter } from "../../ui/bars";
import { Dash } from "../../ui/empty";
import type { Column, Sort } from "../../ui/rows";
import { useClock } from "../shared/clock";
import { isAutomatic, written } from "../shared/labels";
import { NodeStatus, shownStatus, type ShownStatus } from "../shared/node-status";

const CHIPS = 2;

/** Why a node is in its state; "" if there is nothing to say. */
function reasonOf({ rejected, reason }: LiveNode): string {
  return rejected === null ? reason : `rejected: ${rejected.reason}`;
}

function State({ node }: { node: LiveNode }): ReactNode {
  const reason = reasonOf(node);
  return (
    <>
      <NodeStatus node={node} />
      {reason !== "" && (
        <bdi className="name second" title={reason}>
          {reason}
        </bdi>
      )}
    </>
  );
}

/** What is unusual about a node, the worst first. */
function flagsOf(node: LiveNode): string[] {
  return [
    node.open_conflicts > 0 ? "identity conflict" : "",
    node.file_port !== null ? "file port unreachable" : "",
    node.version_skew,
    node.rotation_requested_at !== null ? "rotation requested" : "",
  ].filter(Boolean);
}

function Name({ node }: { node: LiveNode }): ReactNode {
  const flags = flagsOf(node).join(" · ");
  return (
    <>
      <Link className="name node-name" to={`/app/nodes/${node.id}`} title={node.name}>
        <bdi>{node.name}</bdi>
      </Link>
      {flags !== "" && (
        <span className="second name flag" title={flags}>
          {flags}
        </span>
      )}
    </>
  );
}

function Gpu({ node }: { node: LiveNode }): ReactNode {
  const words = gpuWords(node);
  if (words === "") return <Dash why={node.node_type === "agent" ? "agent" : "no GPU"} />;
  return (
    <bdi className="name" title={words}>
      {words}
    </bdi>
  );
}

/** The mean use of the GPUs in per cent; null where no driver reports it. */
export function gpuBusy(node: LiveNode): number | null {
  const known = node.gpus.flatMap(({ utilization }) => utilization ?? []);
  return known.length === 0 ? null : Math.round(known.reduce((sum, percent) => sum + percent, 0) / known.length);
}

function Busy({ node }: { node: LiveNode }): ReactNode {
  const busy = gpuBusy(node);
  if (busy === null) return <Dash why="GPU use not reported" />;
  return (
    <Reported node={node}>
      <span className="meter">
        <ProgressBar name={`GPU busy on ${node.name}`} value={busy} />
        <span>{busy}%</span>
      </span>
    </Reported>
  );
}

function Text({ text, why, title = text }: { text: string; why: string; title?: string }): ReactNode {
  if (text === "") return <Dash why={why} />;
  return (
    <bdi className="mono name small-text" title={title}>
      {text}
    </bdi>
  );
}

/** Figures come with heartbeats, which count only while the node is in service: before and after that they stand still. */
function Reported({ node, children }: { node: LiveNode; children: ReactNode }): ReactNode {
  const why = node.status === "pending" ? "as of its registration" : node.status === "offline" ? "as of its last heartbeat" : "";
  if (why === "") return children;
  return (
    <span className="outdated" title={`Figures ${why}`}>
      {children}
      <span className="visually-hidden">, {why}</span>
    </span>
  );
}

function Use({ node, name, used, total, reserved = 0, why }: { node: LiveNode; name: string; used: number; total: number; reserved?: number; why: string }): ReactNode {
  if (total <= 0) return <Dash why={why} />;
  return (
    <Reported node={node}>
      <Meter name={name} used={used} reserved={reserved} total={total} />
    </Reported>
  );
}

function Models({ node }: { node: LiveNode }): ReactNode {
  if (node.node_type === "agent") return <Dash why="agents do not run models" />;
  if (node.models.length === 0) return <Dash why="no models" />;
  return <Chips items={node.models.map((model) => [model.id, <Model key={model.id} model={model} />])} itemName="models" />;
}

function Model({ model }: { model: LiveModel }): ReactNode {
  const flight = count(model.in_flight, "request");
  return (
    <span className="chip model" data-state={model.state} title={`${model.model_name}: ${model.state}, ${flight} in flight`}>
      <bdi className="name">{model.model_name}</bdi>
      {model.state !== "loaded" && <span>{model.state}</span>}
      {model.in_flight > 0 && (
        <b>
          {model.in_flight}
          <span className="visually-hidden"> in flight</span>
        </b>
      )}
    </span>
  );
}

/** Name and vendor are there already, and the node's page shows the cap. */
const SHOWN_IN_OTHER_CELLS = new Set(["node.name", "node.replica-slots", "gpu.vendor"]);

function labelsOf(node: LiveNode): string[] {
  const labels = Object.entries(node.labels).filter(([key]) => !SHOWN_IN_OTHER_CELLS.has(key));
  // Labels of a person or the worker are more useful than those that the registry writes.
  return labels.toSorted(([left], [right]) => Number(isAutomatic(left)) - Number(isAutomatic(right))).map(([key, value]) => written(key, value));
}

function Labels({ node }: { node: LiveNode }): ReactNode {
  const labels = labelsOf(node);
  if (labels.length === 0) return <Dash why="no labels" />;
  const chip = (text: string) => (
    <span key={text} className="chip" title={text}>
      <bdi className="name">{text}</bdi>
    </span>
  );
  return <Chips items={labels.map((text) => [text, chip(text)])} itemName="labels" />;
}

function Chips({ items, itemName }: { items: readonly (readonly [string, ReactNode])[]; itemName: string }): ReactNode {
  const over = items.length - CHIPS;
  return (
    <span className={`cell-chips ${over > 0 ? "with-more" : ""}`}>
      {items.slice(0, CHIPS).map(([, chip]) => chip)}
      {over > 0 && (
        <span className="muted over">
          +{over}
          <span className="visually-hidden"> more {itemName}</span>
        </span>
      )}
    </span>
  );
}

/** The age of the last beat, by the one clock of the list. */
function Beat({ at }: { at: string | null }): ReactNode {
  const time = at === null ? Number.NaN : Date.parse(at);
  const text = useClock((now) => (Number.isNaN(time) ? "never" : ago((now - time) / 1000)));
  if (at === null) return <span className="muted">never</span>;
  return (
    <time dateTime={at} title={exact(at)}>
      {text}
    </time>
  );
}

const SEVERITY: Readonly<Record<ShownStatus, number>> = { pending: 0, offline: 2, unhealthy: 3, draining: 4, healthy: 5, rejected: 6 };
/** Somebody else claims to be the node: only an approval comes before that. */
const CLAIMED = 1;

const agentWords = (node: LiveNode, words: string) => (node.node_type === "agent" ? "agents do not run models" : words);

export const COLUMNS: readonly Column<LiveNode>[] = [
  { key: "name", title: "Name", width: [9, 1.4], value: (node) => node.name, cell: (node) => <Name node={node} /> },
  {
    key: "state", title: "State", by: "needs attention first", width: [8.5, 1.8], cell: (node) => <State node={node} />,
    value: (node) => (node.open_conflicts > 0 ? Math.min(CLAIMED, SEVERITY[node.status]) : SEVERITY[shownStatus(node)]),
  },
  { key: "gpu", title: "GPU", width: [7, 1], leaveOut: 3, value: (node) => gpuWords(node) || null, cell: (node) => <Gpu node={node} /> },
  { key: "busy", title: "Busy", by: "GPU use", width: [4, 0.3], largestFirst: true, leaveOut: 2, value: gpuBusy, cell: (node) => <Busy node={node} /> },
  {
    key: "vram", title: "VRAM", by: "free VRAM", width: [7.5, 0.4], largestFirst: true, value: (node) => (node.total_vram > 0 ? node.available_vram : null),
    cell: (node) => <Use node={node} name="VRAM" used={usedVram(node)} reserved={node.reserved_vram} total={vramLimit(node)} why={agentWords(node, "no GPU memory")} />,
  },
  {
    key: "ram", title: "RAM", by: "free RAM", width: [7.5, 0.4], largestFirst: true, leaveOut: 4, value: (node) => (node.total_ram > 0 ? node.available_ram : null),
    cell: (node) => <Use node={node} name="RAM" used={usedRam(node)} total={node.total_ram} why="RAM unknown" />,
  },
  {
    key: "disk", title: "Disk", by: "free disk", width: [7.5, 0.4], largestFirst: true, leaveOut: 5, value: (node) => (node.total_disk > 0 ? node.available_disk : null),
    cell: (node) => <Use node={node} name="Disk" used={node.total_disk - node.available_disk} total={node.total_disk} why="disk unknown" />,
  },
  {
    key: "models", title: "Models", by: "loaded models", width: [7.5, 1.5], largestFirst: true, leaveOut: 1, cell: (node) => <Models node={node} />,
    value: (node) => (node.node_type === "agent" ? null : node.model_count + node.in_flight_count / 1e6),
  },
  {
    // The age of the last beat: ascending is the latest first.
    key: "beat", title: "Heartbeat", by: "age of the last heartbeat", width: [5, 0], leaveOut: 6, cell: (node) => <Beat at={node.last_heartbeat} />,
    value: (node) => (node.last_heartbeat === null ? null : -Date.parse(node.last_heartbeat)),
  },
  { key: "labels", title: "Labels", width: [7.25, 0.8], leaveOut: 7, value: (node) => labelsOf(node).join(" ") || null, cell: (node) => <Labels node={node} /> },
  { key: "address", title: "Address", width: [9, 0.5], leaveOut: 8, value: (node) => node.address || null, cell: (node) => <Text text={node.address} why="No address" /> },
  { key: "version", title: "Version", width: [5, 0.2], leaveOut: 9, extra: true, value: (node) => node.worker_version || null, cell: (node) => <Text text={node.worker_version} why="version unknown" /> },
];

/** The exported columns: states and models by their names, memory and disk with what they have in all. */
export const EXPORTED: readonly Column<LiveNode>[] = [
  ...COLUMNS.flatMap((column): Column<LiveNode>[] => {
    if (column.key === "state") return [{ ...column, value: shownStatus }, { ...column, title: "Reason", value: reasonOf }];
    if (column.key === "models") return [{ ...column, value: (node) => node.models.map((model) => model.model_name).join(" ") }];
    if (column.key === "beat") return [{ ...column, value: (node) => node.last_heartbeat }];
    if (column.key === "busy") return [{ ...column, title: "GPU busy %" }];
    const total = { vram: "total_vram", ram: "total_ram", disk: "total_disk" } as const;
    if (!(column.key in total)) return [column];
    const field = total[column.key as keyof typeof total];
    return [{ ...column, title: `${column.title} free bytes` }, { ...column, title: `${column.title} bytes`, value: (node) => node[field] }];
  }),
];

export const DEFAULT_SORT: Sort = { key: "state", descending: false };
