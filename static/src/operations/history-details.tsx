// The details of an operation that has ended: who asked for what, when, from where, and how it went on each node.
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { count, duration, exact } from "../lib/format";
import { useNow } from "../live/hooks";
import type { Operation, OperationTarget } from "../live/messages";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy";
import { Problem } from "../ui/problem";
import { StatusPill } from "../ui/status";
import { canRetry, retry } from "./calls";
import { causesOf } from "./causes";
import { Causes } from "./causes-list";
import { Reason } from "./failure";
import { spans } from "./history-query";
import { NodeLink } from "./targets";
import { pageOf, request } from "./words";

const AT_ONCE = 50;
const WIDTH = 100;

export function HistoryDetails({ operation }: { operation: Operation }): ReactNode {
  const { nodes = [] } = operation;
  return (
    <div className="stack history-details">
      <Facts operation={operation} />
      {nodes.length <= 1 && (operation.error ?? "") !== "" && <Reason error={operation.error} name={operation.name} />}
      {nodes.length > 0 && <TargetsTimeline operation={operation} nodes={nodes} />}
      <div className="row wrap">
        {canRetry(operation) && <RetryAgain operation={operation} />}
        <Link to={pageOf(operation)}>Open page</Link>
        <CopyButton small text={operation.jobID} label="Copy operation ID" />
      </div>
    </div>
  );
}

export function Facts({ operation }: { operation: Operation }): ReactNode {
  const { dismissedAt, dismissedBy = "", dismissedComment = "", allNodes = false, startedAt, finishedAt, clientAddress = "" } = operation;
  return (
    <dl className="record-facts">
      <Fact name="What">
        {request(operation)} <bdi>{operation.fullName}</bdi>
        {allNodes && " on all nodes"}
      </Fact>
      <Fact name="Who">
        <bdi>{operation.actor}</bdi>
        {clientAddress !== "" && (
          <>
            {" "}
            from <bdi>{clientAddress}</bdi>
          </>
        )}
      </Fact>
      {operation.requestID !== "" && (
        <Fact name="Request ID">
          <code>{operation.requestID}</code>
        </Fact>
      )}
      <Fact name="Requested">{exact(operation.createdAt)}</Fact>
      {startedAt !== undefined && <Fact name="Started">{exact(startedAt)}</Fact>}
      {finishedAt !== undefined && <Fact name="Ended">{exact(finishedAt)}</Fact>}
      {operation.status === "cancelled" && <Fact name="Cancelled">{operation.message}</Fact>}
      {dismissedAt !== undefined && (
        <Fact name="Dismissed">
          {exact(dismissedAt)} by <bdi>{dismissedBy}</bdi>
          {dismissedComment !== "" && (
            <>
              : <bdi>{dismissedComment}</bdi>
            </>
          )}
        </Fact>
      )}
    </dl>
  );
}

function Fact({ name, children }: { name: string; children: ReactNode }): ReactNode {
  return (
    <>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </>
  );
}

/** The causes of its failures, and a line a node: when it waited, when it ran, how often it was tried, and how it ended. */
export function TargetsTimeline({ operation, nodes }: { operation: Operation; nodes: readonly OperationTarget[] }): ReactNode {
  const [isExpanded, setIsExpanded] = useState(false);
  const begin = Date.parse(operation.createdAt);
  const now = useNow(1000);
  const end = operation.finishedAt === undefined ? now : Date.parse(operation.finishedAt);
  const worst = (node: OperationTarget) => (node.status === "error" ? 0 : node.status === "success" ? 2 : 1);
  const sorted = [...nodes].sort((left, right) => worst(left) - worst(right));
  const causes = nodes.length > 1 ? causesOf([operation], true) : [];
  return (
    <>
      {causes.length > 0 && <Causes causes={causes} name={operation.name} isSeveral={false} actions={false} />}
      <ul className="timeline-parts" aria-label={`Nodes of ${operation.name}`}>
        {sorted.slice(0, isExpanded ? sorted.length : AT_ONCE).map((node) => (
          <li key={node.node_id}>
            <div className="part-line">
              <StatusPill status={node.status} />
              <NodeLink nodeID={node.node_id} name={node.node_name} />
              <Timeline node={node} begin={begin} end={end} />
              <span className="muted grow">
                {took(node, operation.createdAt)}
                {(node.attempts ?? 0) > 0 && ` · ${count(node.attempts ?? 0, "failed attempt")}`}
              </span>
            </div>
            {(node.reason ?? "") !== "" && (
              <p className="muted">
                <bdi>{node.reason}</bdi>
              </p>
            )}
          </li>
        ))}
      </ul>
      {!isExpanded && sorted.length > AT_ONCE && (
        <div>
          <Button small onClick={() => setIsExpanded(true)}>
            Show all ({sorted.length})
          </Button>
        </div>
      )}
    </>
  );
}

/** "waited 3s, ran 40s"; what is not known is left out. */
export function took(node: Pick<OperationTarget, "startedAt" | "finishedAt">, createdAt: string): string {
  const between = (from: string | undefined, to: string | undefined) => {
    const seconds = (Date.parse(to ?? "") - Date.parse(from ?? "")) / 1000;
    return Number.isNaN(seconds) ? "" : duration(seconds);
  };
  const waited = between(createdAt, node.startedAt ?? node.finishedAt);
  const ran = between(node.startedAt, node.finishedAt);
  return [waited && `waited ${waited}`, ran && `ran ${ran}`].filter(Boolean).join(", ");
}

function Timeline({ node, begin, end }: { node: OperationTarget; begin: number; end: number }): ReactNode {
  const { waited, ran } = spans(node, begin, end);
  return (
    <svg className="part-timeline" viewBox={`0 0 ${WIDTH} 6`} preserveAspectRatio="none" aria-hidden="true">
      <rect className="waited" x={0} y={2} width={WIDTH * waited.to} height={2} />
      <rect className={`ran ${node.status}`} x={WIDTH * ran.from} y={0} width={Math.max(WIDTH * (ran.to - ran.from), node.startedAt === undefined ? 0 : 1)} height={6} />
    </svg>
  );
}

export function RetryAgain({ operation }: { operation: Operation }): ReactNode {
  const retrying = useAction(() => retry(operation), `${request(operation)} ${operation.name} requested again`);
  return (
    <>
      <Button small busy={retrying.busy} refusal={retrying.succeeded ? "Requested again" : ""} aria-label={`Retry: ${request(operation)} ${operation.name}`} onClick={() => retrying.run()}>
        Retry
      </Button>
      <Problem error={retrying.error} onDismiss={retrying.forget} />
    </>
  );
}
