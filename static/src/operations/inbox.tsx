// The inbox: failures to retry or dismiss, the newest first. It is live; a failure leaves it for all users when it is
// tried again or dismissed.
import { useMutation } from "@tanstack/react-query";
import { memo, useDeferredValue, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
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
import { failedNodes, partsOf } from "./model";
import { Parts } from "./parts";
import { ActivityHead } from "./tabs";
import { pageOf, phrase, place } from "./words";

const AT_ONCE = 50;

/** Failures that are not dismissed, the newest first. */
export function inboxOf(operations: Iterable<Operation>): Operation[] {
  const ended = (one: Operation) => Date.parse(one.finishedAt ?? one.createdAt);
  return [...operations].filter(needsAttention).sort((left, right) => ended(right) - ended(left) || right.seq - left.seq);
}

export function InboxPage(): ReactNode {
  const operations = useDeferredValue(useLive((state) => state.operations));
  const known = useLive((state) => state.operationsSeq !== null);
  const failures = useMemo(() => inboxOf(operations.values()), [operations]);
  return (
    <div className="activity">
      <ActivityHead title="Inbox" note={known && (failures.length === 0 ? "No failures" : `${count(failures.length, "failure")} to retry or dismiss`)} />
      {!known && <Loading what="failures" />}
      {known && failures.length === 0 && (
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
  const chosen = failures.filter((one) => selected.has(one.jobID));
  const pick = (some: readonly Operation[], on: boolean) =>
    setSelected((before) => {
      const after = new Set(before);
      for (const { jobID } of some) if (on) after.add(jobID); else after.delete(jobID);
      return after;
    });
  return (
    <>
      <Bulk failures={failures} chosen={chosen} onPick={pick} onDismiss={setDismissing} />
      <ul className="inbox" aria-label="Failures">
        {failures.slice(0, limit).map((one) => (
          <Failure key={one.jobID} operation={one} selected={selected.has(one.jobID)} onPick={pick} onDismiss={setDismissing} />
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

type Pick = (some: readonly Operation[], on: boolean) => void;
type Dismiss = (some: readonly Operation[]) => void;

interface BulkProps {
  failures: readonly Operation[];
  chosen: readonly Operation[];
  onPick: Pick;
  onDismiss: Dismiss;
}

function Bulk({ failures, chosen, onPick, onDismiss }: BulkProps): ReactNode {
  const again = useRetry();
  // Nothing selected means all of them.
  const some = chosen.length > 0 ? chosen : failures;
  const which = chosen.length > 0 ? `selected (${chosen.length})` : `all (${failures.length})`;
  const possible = some.filter(canRetry);
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
        <Button small busy={again.isPending} refusal={possible.length === 0 ? "None of these can be retried" : ""} onClick={() => again.mutate(possible)}>
          Retry {which}
        </Button>
        <Button small onClick={() => onDismiss(some)}>
          Dismiss {which}…
        </Button>
      </div>
      {again.error !== null && <Problem error={again.error} onDismiss={() => again.reset()} />}
    </>
  );
}

function useRetry() {
  return useMutation({
    mutationFn: (some: readonly Operation[]) => act("retry", some),
    onSuccess: (_, some) => announce(`${count(some.length, "operation")} started again`),
  });
}

interface FailureProps {
  operation: Operation;
  selected: boolean;
  onPick: Pick;
  onDismiss: Dismiss;
}

const Failure = memo(
  function Failure({ operation, selected, onPick, onDismiss }: FailureProps): ReactNode {
    const again = useRetry();
    const parts = partsOf(operation);
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
        {parts.length > 1 ? <Parts parts={parts} name={operation.name} target="" /> : <Reason error={brief(operation.error ?? "No reason given", 2_000)} name={operation.name} />}
        <div className="row wrap">
          {canRetry(operation) && (
            <Button small busy={again.isPending} refusal={again.isSuccess ? "Started again; waiting for the live feed" : ""} aria-label={`${nodes.length > 1 ? `Retry all failed (${nodes.length})` : "Retry"}: ${title}`} onClick={() => again.mutate([operation])}>
              {nodes.length > 1 ? `Retry all failed (${nodes.length})` : "Retry"}
            </Button>
          )}
          <Button small aria-label={`Dismiss: ${title}`} onClick={() => onDismiss([operation])}>
            Dismiss…
          </Button>
          <CopyButton small text={quote(operation)} label="Copy error" />
        </div>
        {again.error !== null && <Problem error={again.error} onDismiss={() => again.reset()} />}
      </li>
    );
  },
  (left, right) => left.operation === right.operation && left.selected === right.selected,
);
