// The first page: first steps of a new cluster, what needs attention, the nodes at a glance, figures over time, and what runs.
import { useMemo, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, compareNames, count } from "../lib/format";
import { useLive } from "../live/hooks";
import { Fetched, Panel } from "../nodes/detail/panel";
import { shownStatus } from "../nodes/shared/node-status";
import { fillOf } from "../ui/bars";
import { Icon } from "../ui/icons";
import { figures, SilenceNotice } from "../operations/lines";
import { labelOf } from "../operations/words";
import { StatusPill } from "../ui/status";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import { Charts } from "./charts";
import { useOverview, type Overview } from "./data";
import "../nodes/detail/detail.css";
import "./overview.css";

export function OverviewPage(): ReactNode {
  const query = useOverview();
  return (
    <div className="ov">
      <PageHead title="Overview" />
      <Fetched query={query} subject="the overview">
        {(overview) => (
          <>
            {overview.first_steps.some(({ done }) => !done) && <FirstSteps steps={overview.first_steps} />}
            <Traffic traffic={overview.traffic} />
            <Attention groups={overview.attention} />
            {overview.nodes.length > 0 && <Strip overview={overview} />}
          </>
        )}
      </Fetched>
      {/* The panels above come first, so that they do not push the charts down. */}
      {(!query.isPending || query.failureCount > 0) && <Charts hasGpus={query.data?.nodes.some(({ gpus }) => gpus > 0) ?? true} />}
      {query.data !== undefined && query.data.running_count > 0 && <Running overview={query.data} />}
    </div>
  );
}

const STEPS: Readonly<Record<Overview["first_steps"][number]["id"], { to: string; text: string }>> = {
  add_node: { to: "/app/nodes", text: "Add a node" },
  load_model: { to: "/app/models/add", text: "Add a model" },
  chat: { to: "/app/chat", text: "Chat with it" },
};

function FirstSteps({ steps }: { steps: Overview["first_steps"] }): ReactNode {
  return (
    <Panel title="First steps">
      <ol className="ov-steps">
        {steps.map(({ id, done }) => (
          <li key={id} data-done={done || undefined}>
            {done && <Icon name="done" />}
            <Link to={STEPS[id].to}>{STEPS[id].text}</Link>
            {done && <span className="muted">done</span>}
          </li>
        ))}
      </ol>
    </Panel>
  );
}

function Traffic({ traffic }: { traffic: Overview["traffic"] }): ReactNode {
  const first = traffic.first_token_seconds;
  const figures: readonly (readonly [string, string])[] = [
    ["Requests", `${traffic.requests_per_second}/s`],
    ["Output tokens", `${traffic.tokens_per_second}/s`],
    ["Time to first token", first === null ? "no requests" : `${first} s`],
    ["Errors", `${traffic.errors_per_second}/s`],
  ];
  return (
    <Panel title="Last minute">
      <dl className="ov-figures">
        {figures.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}

type Group = Pick<Overview["attention"][number], "level" | "text" | "count" | "names"> & { cause: Overview["attention"][number]["cause"] | "pending_nodes" };

/** The page on which something can be done about a cause. */
const PAGES: Readonly<Record<Group["cause"], string>> = {
  failures: "/app/activity/inbox",
  pending_nodes: "/app/nodes?state=pending",
  silent_nodes: "/app/nodes?state=offline",
  unhealthy_nodes: "/app/nodes?state=unhealthy",
  full_disks: "/app/capacity?of=disk",
  gpu_errors: "/app/nodes",
  definitions: "/app/models",
  join_tokens: "/app/nodes",
  bus_credentials: "/app/nodes",
  versions: "/app/nodes",
};

const NAMED = 5;

/** The workers that await approval; the feed has them, and this page's figures are of approved nodes only. */
function usePending(): Group[] {
  const nodes = useLive((state) => state.nodes);
  return useMemo(() => {
    const names = Array.from(nodes.values()).filter((node) => shownStatus(node) === "pending").map(({ name }) => name).sort(compareNames);
    if (names.length === 0) return [];
    return [{ cause: "pending_nodes", level: "warning", text: names.length === 1 ? "A worker awaits approval" : "Workers await approval", count: names.length, names: names.slice(0, NAMED) }];
  }, [nodes]);
}

function Attention({ groups: ofServer }: { groups: Overview["attention"] }): ReactNode {
  const groups: readonly Group[] = [...ofServer, ...usePending()];
  return (
    <Panel title="Needs attention">
      {groups.length === 0 && <p className="muted">Nothing needs attention.</p>}
      {groups.length > 0 && (
        <ul className="ov-lines" aria-label="Needs attention">
          {groups.map((group, index) => (
            <li key={`${group.cause} ${group.text} ${index}`}>
              <span className={`pill ${group.level === "error" ? "bad" : "warn"}`}>{group.count}</span>
              <Link to={PAGES[group.cause]}>
                <bdi>{group.text}</bdi>
              </Link>
              <span className="muted">
                <bdi>{group.names.join(", ")}</bdi>
                {group.count > group.names.length && group.names.length > 0 && " and more"}
              </span>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

type Cell = Overview["nodes"][number];

function sum(cells: readonly Cell[], pick: (cell: Cell) => number): number {
  return cells.reduce((total, cell) => total + pick(cell), 0);
}

/** A cell for each node, coloured by its VRAM, or by its RAM where there is no GPU. The sentence above has the sums. */
function Strip({ overview: { nodes, node_count: total } }: { overview: Overview }): ReactNode {
  const heard = nodes.filter(({ status }) => status !== "offline");
  const gpus = sum(heard, (cell) => cell.gpus);
  const measured = heard.filter(({ busy }) => busy !== null);
  const measuredGpus = sum(measured, (cell) => cell.gpus);
  const busy = sum(measured, (cell) => (cell.busy ?? 0) * cell.gpus);
  const vram = sum(heard, (cell) => cell.vram_total);
  const memory = vram > 0 ? `${bytes(sum(heard, (cell) => cell.vram_used))} of ${bytes(vram)} VRAM used` : `${bytes(sum(heard, (cell) => cell.ram_used))} of ${bytes(sum(heard, (cell) => cell.ram_total))} RAM used`;
  return (
    <Panel title="Nodes" aside={<Link to="/app/capacity">Capacity</Link>}>
      <p>
        {count(total, "node")}
        {gpus > 0 && `, ${count(gpus, "GPU")}`}
        {measuredGpus > 0 && ` ${Math.round(busy / measuredGpus)}% busy`}, {memory}.{nodes.length < total && ` The first ${nodes.length} are shown.`}
      </p>
      <div className="ov-strip" aria-hidden="true">
        {nodes.map((cell) => (
          <span key={cell.id} title={titleOf(cell)} data-status={cell.status} data-fill={fillOf(usedOf(cell), totalOf(cell)) || undefined}>
            <span style={{ height: `${(100 * usedOf(cell)) / Math.max(totalOf(cell), 1)}%` }} />
          </span>
        ))}
      </div>
    </Panel>
  );
}

function usedOf(cell: Cell): number {
  return cell.vram_total > 0 ? cell.vram_used : cell.ram_used;
}

function totalOf(cell: Cell): number {
  return cell.vram_total > 0 ? cell.vram_total : cell.ram_total;
}

function titleOf(cell: Cell): string {
  const busy = cell.busy === null ? "" : `, ${Math.round(cell.busy)}% busy`;
  return `${cell.name}: ${cell.status}, ${bytes(usedOf(cell))} of ${bytes(totalOf(cell))} ${cell.vram_total > 0 ? "VRAM" : "RAM"}${busy}`;
}

function Running({ overview: { running, running_count: total } }: { overview: Overview }): ReactNode {
  return (
    <Panel title="Running" aside={<Link to="/app/activity">All {total}</Link>}>
      <ul className="ov-lines" aria-label="Running operations">
        {running.map((operation) => (
          <li key={operation.id}>
            <StatusPill status={operation.status} />
            <Link to={`/app/operations/${operation.id}`}>
              {labelOf(operation.kind)} <bdi>{operation.element}</bdi>
            </Link>
            <span className="muted">
              {operation.node_name !== "" && (
                <>
                  <bdi>{operation.node_name}</bdi>,{" "}
                </>
              )}
              {operation.progress > 0 && `${Math.floor(operation.progress)}%, `}
              <bdi>{operation.message}</bdi>
              {operation.message === "" && figures(operation.current_bytes, operation.total_bytes, undefined)} <Ago at={operation.created_at} />
            </span>
            {operation.status === "processing" && <SilenceNotice of={{ lastProgressAt: operation.last_progress_at ?? "", timeLimitAt: operation.time_limit_at ?? "" }} />}
          </li>
        ))}
      </ul>
    </Panel>
  );
}
