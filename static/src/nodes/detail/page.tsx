// One node, live, in parts that have an address each. The row comes with the feed; facts, backends and timeline are queries
// of their own, asked for again when the row has moved, so that any of them may fail and the rest of the page goes on.
import { useState, type ReactNode } from "react";
import { Link, useParams } from "react-router";
import type { UseQueryResult } from "@tanstack/react-query";
import { ApiError } from "../../api/client";
import { useLive } from "../../live/hooks";
import type { LiveNode, Operation } from "../../live/messages";
import { isActive } from "../../live/store";
import { AfterPaint } from "../../ui/after-paint";
import { Empty, Loading } from "../../ui/empty";
import { Problem } from "../../ui/problem";
import { Tabs } from "../../ui/tabs";
import { usePageTitle } from "../../ui/title";
import { Logs } from "../logs/page";
import { Backends } from "./backends";
import { Capacity } from "./capacity";
import { Charts } from "./charts";
import { Conflicts } from "./conflicts";
import { Conditions, Hardware, Identity } from "./conditions";
import { DangerQuestions, type Danger } from "./danger";
import { useDetail, useInStep, type NodeDetail } from "./data";
import { BackLink, Head } from "./head";
import { Gpus } from "./gpus";
import { Labels } from "./labels";
import { Memory } from "./memory";
import { Replicas } from "./replicas";
import { Running, useOperations } from "./running";
import { Slots } from "./slots";
import { TimelinePanel } from "./timeline";
import "./detail.css";

export function NodePage(): ReactNode {
  const { id: given = "", part = "" } = useParams();
  const id = given.toLowerCase();
  // Another node is another page: nothing of the one before may stay.
  return <OneNode key={id} id={id} part={part} />;
}

function OneNode({ id, part }: { id: string; part: string }): ReactNode {
  const live = useLive((state) => state.nodes.get(id));
  const detail = useDetail(id);
  const [lastName, setSeen] = useState("");
  useInStep(id, live);
  if (live !== undefined && live.name !== lastName) setSeen(live.name);
  usePageTitle(live?.name ?? lastName);
  if (live !== undefined) return <Shown node={live} detail={detail} part={part} />;
  return lastName === "" ? <Waiting detail={detail} /> : <Removed id={id} name={lastName} />;
}

interface PartProps {
  node: LiveNode;
  detail: UseQueryResult<NodeDetail>;
  /** Those of this node that are under way or have failed. */
  operations: readonly Operation[];
}

interface Part {
  /** The end of its address; "" for the first one. */
  path: string;
  title: string;
  count?: (node: LiveNode) => number;
  /** False if the node never has it. */
  has?: (node: LiveNode) => boolean;
  Content: (props: PartProps) => ReactNode;
}

/** An agent loads no models and installs no backends. */
const isWorker = (node: LiveNode) => node.node_type === "backend";

const PARTS: readonly [Part, ...Part[]] = [
  { path: "", title: "Overview", Content: Overview },
  {
    path: "replicas",
    title: "Replicas",
    count: (node) => node.models.length,
    has: isWorker,
    Content: ({ node }) => (
      <>
        <Replicas node={node} />
        <Slots node={node} />
      </>
    ),
  },
  { path: "backends", title: "Backends", count: (node) => node.backends.length, has: isWorker, Content: Backends },
  { path: "logs", title: "Logs", has: (node) => isWorker(node) && node.status !== "pending", Content: ({ node }) => <Logs node={node} /> },
  { path: "timeline", title: "Timeline", Content: ({ node }) => <TimelinePanel id={node.id} /> },
  { path: "settings", title: "Settings", Content: Settings },
];

function addressOf(node: LiveNode, path: string): string {
  return `/app/nodes/${node.id}${path === "" ? "" : `/${path}`}`;
}

function Shown({ node, detail, part }: { node: LiveNode; detail: UseQueryResult<NodeDetail>; part: string }): ReactNode {
  const operations = useOperations(node.id);
  const active = operations.filter(isActive).length;
  const [danger, setDanger] = useState<Danger | null>(null);
  const parts = PARTS.filter(({ has }) => has?.(node) !== false);
  const { path, Content } = parts.find((candidate) => candidate.path === part) ?? PARTS[0];
  return (
    <div className="nd">
      <Head node={node} operations={active} onDanger={setDanger} />
      <DangerQuestions node={node} operations={active} dialog={danger} onOpenDialog={setDanger} />
      <Tabs
        label={`Sections of ${node.name}`}
        current={addressOf(node, path)}
        tabs={parts.map(({ path: end, title, count }) => ({
          to: addressOf(node, end),
          title,
          mark: count !== undefined && count(node) > 0 && <span className="muted">{count(node)}</span>,
        }))}
      />
      <AfterPaint>
        <Content node={node} detail={detail} operations={operations} />
      </AfterPaint>
    </div>
  );
}

function Overview({ node, detail, operations }: PartProps): ReactNode {
  return (
    <>
      {/* Approving needs its identity. */}
      {node.status === "pending" && <Identity node={node} detail={detail} />}
      {node.open_conflicts > 0 && <Conflicts node={node} />}
      <Gpus node={node} />
      <Memory node={node} />
      <Charts node={node} />
      <div className="nd-columns">
        <div className="nd-column">
          <Conditions node={node} detail={detail} />
          <Running id={node.id} operations={operations} />
        </div>
        <Hardware node={node} detail={detail} />
      </div>
    </>
  );
}

function Settings({ node, detail }: PartProps): ReactNode {
  return (
    <div className="nd-columns">
      <div className="nd-column">
        {isWorker(node) && <Capacity node={node} detail={detail} />}
        <Labels node={node} sources={detail.data?.label_sources} />
      </div>
      {node.status !== "pending" && <Identity node={node} detail={detail} />}
    </div>
  );
}

/** Before the node is there: what is waited for, or that there is none. */
function Waiting({ detail }: { detail: UseQueryResult<NodeDetail> }): ReactNode {
  const cut = useLive((state) => state.connection !== "live" && state.connection !== "connecting");
  const { error } = detail;
  const isLoaded = useLive((state) => state.nodesCursor !== null);
  if (error instanceof ApiError && error.status === 404) return <NotFound />;
  return (
    <div className="nd">
      <BackLink />
      <h1 tabIndex={-1}>{detail.data === undefined ? "Node" : <bdi>{detail.data.name}</bdi>}</h1>
      <Problem error={error} onRetry={() => void detail.refetch()} />
      {cut ? (
        <p role="status">The live feed is unreachable; reconnecting automatically.</p>
      ) : (
        error === null && <Loading subject={isLoaded ? "the node" : "the live state of all nodes"} />
      )}
      <div className="nd-columns" aria-hidden="true">
        <div className="nd-skeleton" />
        <div className="nd-skeleton" />
      </div>
    </div>
  );
}

function NotFound(): ReactNode {
  return (
    <div className="nd">
      <BackLink />
      <h1 tabIndex={-1}>Node not found</h1>
      <Empty title="No node has this ID.">
        <p>It may have been removed. A worker that registers again gets a new ID.</p>
        <Link className="button" to="/app/nodes">Show all nodes</Link>
      </Empty>
    </div>
  );
}

/** The node was removed a moment ago. Its timeline stays and names the person. */
function Removed({ id, name }: { id: string; name: string }): ReactNode {
  return (
    <div className="nd">
      <BackLink />
      <h1 tabIndex={-1}>
        <bdi>{name}</bdi>
      </h1>
      <div className="problem" role="alert">
        <span className="grow">
          <strong>This node was removed.</strong> Actions are no longer possible. A running worker re-registers as a new, pending node.
        </span>
        <Link className="button" to="/app/nodes">Show all nodes</Link>
      </div>
      <TimelinePanel id={id} />
    </div>
  );
}
