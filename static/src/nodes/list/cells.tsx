// The cells of a node's row and card. Only the age of the last heartbeat keeps state.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { ago, bytes, count, exact } from "../../lib/format";
import type { LiveModel, LiveNode } from "../../live/messages";
import { gpuWords } from "../../live/gpus";
import { fillOf, Meter } from "../../ui/bars";
import { usedVram, vramLimit } from "../detail/samples";
import { isAutomatic, written } from "../shared/labels";
import { useClock } from "../shared/clock";
import { NodeStatus } from "../shared/node-status";

const CHIPS = 2;

/** An empty cell; assistive tech reads the reason. */
function Dash({ why }: { why: string }): ReactNode {
  return (
    <span className="muted" title={why}>
      <span aria-hidden="true">–</span>
      <span className="visually-hidden">{why}</span>
    </span>
  );
}

export function State({ node }: { node: LiveNode }): ReactNode {
  const reason = node.rejected === null ? node.reason : `rejected: ${node.rejected.reason}`;
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

export function Name({ node }: { node: LiveNode }): ReactNode {
  return (
    <>
      <Link className="name node-name" to={`/app/nodes/${node.id}`} title={node.name}>
        <bdi>{node.name}</bdi>
      </Link>
      <span className="second name" title={gpuWords(node)}>
        {node.node_type === "agent" ? "agent" : gpuWords(node) || "no GPU"}
        {node.open_conflicts > 0 && <span className="flag"> · identity conflict</span>}
        {node.file_port !== null && <span className="flag"> · file port unreachable</span>}
        {node.rotation_requested_at !== null && <span> · rotation requested</span>}
        {node.version_skew !== "" && <span className="flag"> · {node.version_skew}</span>}
      </span>
    </>
  );
}

export function Address({ node }: { node: LiveNode }): ReactNode {
  if (node.address === "") return <Dash why="No address" />;
  return (
    <>
      <bdi className="mono name small-text" title={node.address}>
        {node.address}
      </bdi>
      {node.worker_version !== "" && (
        <bdi className="second name" title={`Worker version ${node.worker_version}`}>
          v{node.worker_version}
        </bdi>
      )}
    </>
  );
}

export function Vram({ node }: { node: LiveNode }): ReactNode {
  if (node.total_vram <= 0) return <Dash why={node.node_type === "agent" ? "agents do not run models" : "no GPU memory"} />;
  return (
    <Reported node={node}>
      <Meter name="VRAM" used={usedVram(node)} reserved={node.reserved_vram} total={vramLimit(node)} />
    </Reported>
  );
}

/** Figures come with heartbeats, which count only while the node is in service: before and after that they stand still. */
function Reported({ node, children }: { node: LiveNode; children: ReactNode }): ReactNode {
  const why = node.status === "pending" ? "as of its registration" : node.status === "offline" ? "as of its last heartbeat" : "";
  if (why === "") return children;
  return (
    <span className="as-told" title={`Figures ${why}`}>
      {children}
      <span className="visually-hidden">, {why}</span>
    </span>
  );
}

export function Ram({ node }: { node: LiveNode }): ReactNode {
  if (node.total_ram <= 0) return <Dash why="RAM unknown" />;
  return <Pair node={node} used={node.total_ram - node.available_ram} total={node.total_ram} />;
}

export function Disk({ node }: { node: LiveNode }): ReactNode {
  if (node.total_disk <= 0) return <Dash why="disk unknown" />;
  return <Pair node={node} used={node.total_disk - node.available_disk} total={node.total_disk} />;
}

function Pair({ node, used, total }: { node: LiveNode; used: number; total: number }): ReactNode {
  return (
    <Reported node={node}>
      <span className={`nowrap fill ${fillOf(used, total)}`}>{bytes(used)}</span>
      <span className="second nowrap">used of {bytes(total)}</span>
      {fillOf(used, total) !== "" && <span className="visually-hidden">, {Math.floor((100 * used) / total)}%</span>}
    </Reported>
  );
}

export function Models({ node, most = CHIPS }: { node: LiveNode; most?: number }): ReactNode {
  if (node.node_type === "agent") return <Dash why="agents do not run models" />;
  if (node.models.length === 0) return <Dash why="no models" />;
  return <Chips items={node.models.map((model) => [model.id, <Model key={model.id} model={model} />])} most={most} itemName="models" />;
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

export function Labels({ node, most = CHIPS }: { node: LiveNode; most?: number }): ReactNode {
  const labels = Object.entries(node.labels).filter(([key]) => !SHOWN_IN_OTHER_CELLS.has(key));
  if (labels.length === 0) return <Dash why="no labels" />;
  // Labels of a person or the worker are more useful than those that the registry writes.
  const ordered = labels.toSorted(([left], [right]) => Number(isAutomatic(left)) - Number(isAutomatic(right)));
  const chips = ordered.map(([key, value]): [string, ReactNode] => [key, <Label key={key} text={written(key, value)} />]);
  return <Chips items={chips} most={most} itemName="labels" />;
}

function Label({ text }: { text: string }): ReactNode {
  return (
    <span className="chip" title={text}>
      <bdi className="name">{text}</bdi>
    </span>
  );
}

function Chips({ items, most, itemName }: { items: readonly (readonly [string, ReactNode])[]; most: number; itemName: string }): ReactNode {
  const over = items.length - most;
  return (
    <span className={`cell-chips ${over > 0 ? "with-more" : ""}`}>
      {items.slice(0, most).map(([, chip]) => chip)}
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
export function Beat({ at }: { at: string | null }): ReactNode {
  const time = at === null ? Number.NaN : Date.parse(at);
  const text = useClock((now) => (Number.isNaN(time) ? "never" : ago((now - time) / 1000)));
  if (at === null) return <span className="muted">never</span>;
  return (
    <time dateTime={at} title={exact(at)}>
      {text}
    </time>
  );
}
