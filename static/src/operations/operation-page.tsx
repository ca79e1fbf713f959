// The page of one operation: a permalink that holds while it waits and runs, and for as long as its record is kept.
import { useMemo, type ReactNode } from "react";
import { Link, useParams } from "react-router";
import { exact } from "../lib/format";
import type { Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { CopyButton } from "../ui/copy";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { PageHead } from "../ui/title";
import "./activity.css";
import { canRetry } from "./calls";
import { FailureCard, ProgressCard } from "./card";
import { failureGroups } from "./causes";
import { Reason } from "./failure";
import { Facts, TargetsTimeline, RetryAgain } from "./history-details";
import { useChanges, useOperation } from "./operation-query";
import "./record.css";
import { words } from "./changes-query";
import { From } from "./lines";
import { phrase, placeOf, stateOf } from "./words";
import { useWork } from "./watch";

export function OperationPage(): ReactNode {
  const id = (useParams()["id"] ?? "").toLowerCase();
  return <OneOperation key={id} id={id} />;
}

function OneOperation({ id }: { id: string }): ReactNode {
  const { operation, unknown, query } = useOperation(id);
  if (operation !== undefined) return <Shown operation={operation} />;
  if (unknown) {
    return (
      <div className="activity">
        <PageHead title="Operation not found" />
        <Empty title="No operation has this ID.">
          <p>Its record may have been cleared, or the retention period is over.</p>
          <Link to="/app/activity/history">Open History</Link>
        </Empty>
      </div>
    );
  }
  return (
    <div className="activity">
      <PageHead title="Operation" />
      {query.error === null ? <Loading subject="the operation" /> : <Problem error={query.error} onRetry={() => void query.refetch()} />}
    </div>
  );
}

function Shown({ operation }: { operation: Operation }): ReactNode {
  const { nodes = [] } = operation;
  const title = [phrase(operation, stateOf(operation)), operation.name, placeOf(operation)].filter(Boolean).join(" ");
  const open = isActive(operation) || needsAttention(operation);
  return (
    <div className="activity">
      <PageHead title={title} named note={<Link to={open ? "/app/activity" : "/app/activity/history"}>{open ? "Activity" : "History"}</Link>}>
        {!open && canRetry(operation) && <RetryAgain operation={operation} />}
        <CopyButton text={operation.jobID} label="Copy operation ID" />
      </PageHead>
      {open && <Card operation={operation} />}
      <section className="stack" aria-label="Request">
        <h2>Request</h2>
        <Facts operation={operation} />
        {!open && nodes.length <= 1 && (operation.error ?? "") !== "" && <Reason error={operation.error} name={operation.name} />}
      </section>
      {nodes.length > 0 && (
        <section className="stack" aria-label="Timeline">
          <h2>Timeline</h2>
          <TargetsTimeline operation={operation} nodes={nodes} />
        </section>
      )}
      <Changes operation={operation} />
    </div>
  );
}

/** The possible actions, and the progress of each node. */
function Card({ operation }: { operation: Operation }): ReactNode {
  const { paces } = useWork();
  const [group] = useMemo(() => failureGroups(needsAttention(operation) ? [operation] : []), [operation]);
  if (group !== undefined) return <FailureCard isTop group={group} linkedJob={operation.jobID} />;
  return <ProgressCard isTop operation={operation} pace={paces.get(operation.jobID)} linkedJob={operation.jobID} />;
}

/** People's actions: requested, cancelled, retried, dismissed. */
function Changes({ operation }: { operation: Operation }): ReactNode {
  const changes = useChanges(operation);
  if (changes.error !== null) return <Problem error={changes.error} onRetry={() => void changes.refetch()} />;
  if (changes.data === undefined || changes.data.length === 0) return null;
  return (
    <section className="stack" aria-label="Changes by people">
      <h2>Changes by people</h2>
      <ul className="ended">
        {changes.data.map((entry) => (
          <li key={entry.id} className="ended-line">
            <span className="muted">{exact(entry.at)}</span>
            <span className="name grow">
              {words(entry)}
              {entry.detail !== "" && <bdi>: {entry.detail}</bdi>}
            </span>
            <span className="muted">
              <bdi>{entry.actor}</bdi> <From entry={entry} />
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}
