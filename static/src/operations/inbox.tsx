// The inbox: failures to retry or dismiss, the newest first. It is live; a failure leaves it for all users when it is
// tried again or dismissed.
import { memo, useDeferredValue, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { brief, count } from "../lib/format";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { needsAttention } from "../live/store";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { Ago } from "../ui/time";
import "./activity.css";
import { act, canRetry } from "./calls";
import { DismissDialog } from "./dismiss";
import { quote, Reason } from "./failure";
import { WorkGlyph } from "./lines";
import { failedNodes, targetsOf } from "./model";
import { Targets } from "./targets";
import { ActivityHead } from "./tabs";
import { pageOf, phrase, place } from "./words";

const AT_ONCE = 50;

/** Failures that are not dismissed, the newest first. */
export function inboxOf(operations: Iterable<Operation>): Operation[] {
  const ended = (operation: Operation) => Date.parse(operation.finishedAt ?? operation.createdAt);
  return [...operations].filter(needsAttention).sort((left, right) => ended(right) - ended(left) || right.seq - left.seq);
}

export function InboxPage(): ReactNode {
  const operations = useDeferredValue(useLive((state) => state.operations));
  const isLoaded = useLive((state) => state.operationsSeq !== null);
  const failures = useMemo(() => inboxOf(operations.values()), [operations]);
  return (
    <div className="activity">
      <ActivityHead title="Inbox" note={isLoaded && (failures.length === 0 ? "No failures" : `${count(failures.length, "failure")} to retry or dismiss`)} />
      {!isLoaded && <Loading subject="failures" />}
      {isLoaded && failures.length === 0 && (
        <Empty title="No failures">
          <p>An operation that fails appears here and stays until you retry or dismiss it.</p>
          <Link className="button" to="/app/activity/history">
            Open History
          </Link>
        </Empty>
      )}
      {failures.length > 0 && <Failures failures={failures} />}
    </div>
  );
}

function Failures({ failures }: { failures: readonly Operation[] }): ReactNode {
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const [limit, setLimit] = useState(AT_ONCE);
  const [dismissing, setDismissing] = useState<readonly Operation[] | null>(null);
  const chosen = failures.filter((operation) => selected.has(operation.jobID));
  const pick = (picked: readonly Operation[], on: boolean) =>
    setSelected((previous) => {
      const after = new Set(previous);
      for (const { jobID } of picked) if (on) after.add(jobID); else after.delete(jobID);
      return after;
    });
  return (
    <>
      <Bulk failures={failures} chosen={chosen} onPick={pick} onDismiss={setDismissing} />
      <ul className="inbox" aria-label="Failures">
        {failures.slice(0, limit).map((operation) => (
          <Failure key={operation.jobID} operation={operation} selected={selected.has(operation.jobID)} onPick={pick} onDismiss={setDismissing} />
        ))}
      </ul>
      {failures.length > limit && (
        <div>
          <Button onClick={() => setLimit(limit + AT_ONCE)}>Show more ({failures.length - limit})</Button>
        </div>
      )}
      {dismissing !== null && <DismissDialog operations={dismissing} onClose={() => setDismissing(null)} />}
    </>
  );
}

type Pick = (picked: readonly Operation[], on: boolean) => void;
type Dismiss = (dismissed: readonly Operation[]) => void;

interface BulkProps {
  failures: readonly Operation[];
  chosen: readonly Operation[];
  onPick: Pick;
  onDismiss: Dismiss;
}

function Bulk({ failures, chosen, onPick, onDismiss }: BulkProps): ReactNode {
  const retrying = useRetry();
  // Nothing selected means all of them.
  const chosenFailures = chosen.length > 0 ? chosen : failures;
  const selectionText = chosen.length > 0 ? `selected (${chosen.length})` : `all (${failures.length})`;
  const possible = chosenFailures.filter(canRetry);
  return (
    <>
      <div className="row wrap" role="toolbar" aria-label="Failures">
        <label className="row">
          <input
            type="checkbox"
            checked={chosen.length === failures.length}
            ref={(box) => {
              if (box !== null) box.indeterminate = chosen.length > 0 && chosen.length < failures.length;
            }}
            onChange={(event) => onPick(failures, event.target.checked)}
          />
          Select all
        </label>
        <Button small busy={retrying.busy} refusal={possible.length === 0 ? "None of these can be retried" : ""} onClick={() => retrying.run(possible)}>
          Retry {selectionText}
        </Button>
        <Button small onClick={() => onDismiss(chosenFailures)}>
          Dismiss {selectionText}…
        </Button>
      </div>
      <Problem error={retrying.error} onDismiss={retrying.forget} />
    </>
  );
}

function useRetry() {
  return useAction(
    (retried: readonly Operation[]) => act("retry", retried),
    (_, retried) => announce(`${count(retried.length, "operation")} started again`),
  );
}

interface FailureProps {
  operation: Operation;
  selected: boolean;
  onPick: Pick;
  onDismiss: Dismiss;
}

const Failure = memo(
  function Failure({ operation, selected, onPick, onDismiss }: FailureProps): ReactNode {
    const retrying = useRetry();
    const targets = targetsOf(operation);
    const nodes = failedNodes([operation]);
    const title = [phrase(operation, "failed"), operation.name, place(operation, nodes)].filter(Boolean).join(" ");
    return (
      <li id={`job-${operation.jobID}`} tabIndex={-1} className="inbox-line">
        <div className="row wrap">
          <input type="checkbox" aria-label={`Select: ${title}`} checked={selected} onChange={(event) => onPick([operation], event.target.checked)} />
          <WorkGlyph state="failed" />
          <h2 className="name grow">
            <Link to={pageOf(operation)}>
              {phrase(operation, "failed")} <bdi>{operation.name}</bdi> <bdi>{place(operation, nodes)}</bdi>
            </Link>
          </h2>
          <span className="muted">
            <Ago at={operation.finishedAt} />
          </span>
        </div>
        <div className="row wrap muted">
          <span>
            requested by <bdi>{operation.actor}</bdi>
          </span>
          {operation.attempts > 0 && <span>{count(operation.attempts, "failed attempt")}</span>}
        </div>
        {targets.length > 1 ? <Targets targets={targets} name={operation.name} linkedJob="" /> : <Reason error={brief(operation.error ?? "No reason given", 2_000)} name={operation.name} />}
        <div className="row wrap">
          {canRetry(operation) && (
            <Button small busy={retrying.busy} refusal={retrying.succeeded ? "Started again; waiting for the live feed" : ""} aria-label={`${nodes.length > 1 ? `Retry all failed (${nodes.length})` : "Retry"}: ${title}`} onClick={() => retrying.run([operation])}>
              {nodes.length > 1 ? `Retry all failed (${nodes.length})` : "Retry"}
            </Button>
          )}
          <Button small aria-label={`Dismiss: ${title}`} onClick={() => onDismiss([operation])}>
            Dismiss…
          </Button>
          <CopyButton small text={quote(operation)} label="Copy error" />
        </div>
        <Problem error={retrying.error} onDismiss={retrying.forget} />
      </li>
    );
  },
  (left, right) => left.operation === right.operation && left.selected === right.selected,
);
