// The inbox: failures to retry or dismiss, the newest first; equal failures are one card. It is live; a failure leaves it
// for all users when it is tried again or dismissed.
import { useDeferredValue, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { needsAttention } from "../live/store";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import "./activity.css";
import { act, canRetry } from "./calls";
import { FailureCard } from "./card";
import { failureGroups, type FailureGroup } from "./causes";
import { DismissDialog } from "./dismiss";
import { ActivityHead } from "./tabs";

const AT_ONCE = 50;

export function InboxPage(): ReactNode {
  const operations = useDeferredValue(useLive((state) => state.operations));
  const isLoaded = useLive((state) => state.operationsSeq !== null);
  const groups = useMemo(() => failureGroups([...operations.values()].filter(needsAttention)), [operations]);
  const failures = useMemo(() => groups.flatMap((group) => group.operations), [groups]);
  return (
    <div className="activity">
      <ActivityHead part="inbox" title="Inbox" note={isLoaded && (failures.length === 0 ? "No failures" : `${count(failures.length, "failure")} to retry or dismiss`)} />
      {!isLoaded && <Loading subject="failures" />}
      {isLoaded && failures.length === 0 && (
        <Empty title="No failures">
          <p>An operation that fails appears here and stays until you retry or dismiss it.</p>
          <Link className="button" to="/app/activity/history">
            Open History
          </Link>
        </Empty>
      )}
      {failures.length > 0 && <Failures groups={groups} failures={failures} />}
    </div>
  );
}

function Failures({ groups, failures }: { groups: readonly FailureGroup[]; failures: readonly Operation[] }): ReactNode {
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const [limit, setLimit] = useState(AT_ONCE);
  const [dismissing, setDismissing] = useState<readonly Operation[] | null>(null);
  const chosen = failures.filter((operation) => selected.has(operation.jobID));
  const pick = (picked: readonly Operation[], on: boolean) =>
    setSelected((previous) => {
      const listed = new Set(failures.map(({ jobID }) => jobID));
      const after = new Set([...previous].filter((jobID) => listed.has(jobID)));
      for (const { jobID } of picked) if (on) after.add(jobID); else after.delete(jobID);
      return after;
    });
  const select = (group: FailureGroup, on: boolean) => pick(group.operations, on);
  return (
    <>
      <Bulk failures={failures} chosen={selected.size > 0 ? chosen : null} onPick={pick} onDismiss={setDismissing} />
      <ul className="inbox" aria-label="Failures">
        {groups.slice(0, limit).map((group) => (
          <li key={group.id}>
            <FailureCard isTop group={group} linkedJob="" selection={{ isSelected: group.operations.every(({ jobID }) => selected.has(jobID)), onSelect: select }} onDismiss={setDismissing} />
          </li>
        ))}
      </ul>
      {groups.length > limit && (
        <div>
          <Button onClick={() => setLimit(limit + AT_ONCE)}>Show more ({groups.length - limit})</Button>
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
  /** Null: nothing is selected, which means all of them. Empty: all that was selected is no longer here. */
  chosen: readonly Operation[] | null;
  onPick: Pick;
  onDismiss: Dismiss;
}

function Bulk({ failures, chosen, onPick, onDismiss }: BulkProps): ReactNode {
  const retrying = useRetry();
  /** The operations that the question is about: others may fail while it is open. */
  const [asked, setAsked] = useState<ReadonlySet<string> | null>(null);
  // The buttons stay those of the selection when what was selected goes: a press must not act on all instead.
  const chosenFailures = chosen ?? failures;
  const selectionText = chosen === null ? `all (${failures.length})` : `selected (${chosen.length})`;
  const concerned = chosenFailures.filter(({ jobID }) => asked?.has(jobID) !== false);
  const possible = concerned.filter(canRetry);
  const refusal = chosenFailures.length === 0 ? "The selected failures are no longer in the inbox" : "";
  return (
    <>
      <div className="row wrap" role="toolbar" aria-label="Failures">
        <label className="row">
          <input
            type="checkbox"
            checked={chosen?.length === failures.length}
            ref={(box) => {
              if (box !== null) box.indeterminate = chosen !== null && chosen.length < failures.length;
            }}
            onChange={(event) => onPick(failures, event.target.checked)}
          />
          Select all
        </label>
        <Button small busy={retrying.busy} refusal={refusal || (possible.length === 0 ? "None of these can be retried" : "")} onClick={() => (chosen === null ? setAsked(new Set(failures.map(({ jobID }) => jobID))) : retrying.run(possible))}>
          Retry {selectionText}
          {chosen === null && "…"}
        </Button>
        <Button small refusal={refusal} onClick={() => onDismiss(chosenFailures)}>
          Dismiss {selectionText}…
        </Button>
      </div>
      <Problem error={retrying.error} onDismiss={retrying.forget} />
      {asked !== null && (
        <Confirm
          open
          onClose={() => setAsked(null)}
          title={`Retry ${count(possible.length, "operation")}`}
          action={`Retry ${count(possible.length, "operation")}`}
          onConfirm={() => {
            setAsked(null);
            retrying.run(possible);
          }}
        >
          <p>Each operation is retried on the nodes where it failed{possible.length < concerned.length && `; ${count(concerned.length - possible.length, "failure")} cannot be retried`}.</p>
        </Confirm>
      )}
    </>
  );
}

function useRetry() {
  return useAction(
    (retried: readonly Operation[]) => act("retry", retried),
    (_, retried) => announce(`${count(retried.length, "operation")} retried`),
  );
}
