// The actions on a failure, where it is shown: retry, dismiss, quote.
import type { ReactNode } from "react";
import { useAction, type Action } from "../api/action";
import { brief, count } from "../lib/format";
import type { Operation } from "../live/messages";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy";
import { Problem } from "../ui/problem";
import { act, canRetry, retry } from "./calls";
import { failuresOf } from "./causes";
import { hasFailed, type Target } from "./model";
import { placeOf } from "./words";

/** A worker may answer with a whole log. */
const LONGEST_ERROR = 2_000;
const ON_ITS_WAY = "Dismissed; waiting for the live feed";

/** The reason in the worker's own words; a long one scrolls in its own place. */
export function Reason({ error = "No reason given", name }: { error: string | undefined; name: string }): ReactNode {
  return (
    <div className="reason" role="group" aria-label={`Details of the failure of ${name}`} tabIndex={0}>
      <bdi>{brief(error, LONGEST_ERROR)}</bdi>
    </div>
  );
}

interface ActionsProps {
  operations: readonly Operation[];
  small?: boolean;
  /** Asks for a comment before the failures are dismissed; absent: they are dismissed at once. */
  onDismiss?: (operations: readonly Operation[]) => void;
}

/** Buttons for one failed operation, or for several of the same kind; each acts on its own jobs. */
export function FailureActions({ operations, small = false, onDismiss }: ActionsProps): ReactNode {
  const retrying = useAction((failures: readonly Operation[]) => act("retry", failures));
  const away = useAction((failures: readonly Operation[]) => act("dismiss", failures));
  // A retry that has succeeded does not answer a later failure.
  const settled = new Set([...confirmation(retrying), ...confirmation(away)]);
  const remaining = operations.filter((operation) => !settled.has(operation.jobID));
  const [first] = operations;
  if (first === undefined) return null;
  const several = operations.length > 1;
  const nodes = operations.flatMap((operation) => failuresOf(operation)).map((target) => target.name);
  const on = several ? `in ${count(operations.length, "operation")}` : nodes.length > 1 ? `on ${count(nodes.length, "node")}` : `on ${first.nodeName ?? nodes[0] ?? "the node"}`;
  const word = retryWord(operations.length, nodes.length);
  const refusal = remaining.length === 0 ? ON_ITS_WAY : "";
  const failed = retrying.error ?? away.error;
  return (
    <>
      <div className="row wrap failure-actions">
        {operations.some(canRetry) && (
          <Button small={small} busy={retrying.busy} refusal={refusal} aria-label={retryName(first.name, on, word)} onClick={() => retrying.run(remaining.filter(canRetry))}>
            {word}
          </Button>
        )}
        <Button small={small} busy={away.busy} refusal={refusal} aria-label={`${several ? "Dismiss all:" : "Dismiss"} ${first.name} ${on}`} onClick={() => (onDismiss === undefined ? away.run(remaining) : onDismiss(remaining))}>
          {`${several ? "Dismiss all" : "Dismiss"}${onDismiss === undefined ? "" : "…"}`}
        </Button>
        {!several && <CopyButton small={small} text={quote(first)} label="Copy error" />}
      </div>
      {failed !== null && (
        <Problem
          error={failed}
          onDismiss={() => {
            retrying.forget();
            away.forget();
          }}
        />
      )}
    </>
  );
}

function retryWord(operations: number, nodes: number): string {
  if (operations > 1) return "Retry all";
  return nodes > 1 ? `Retry all failed (${nodes})` : "Retry";
}

/** Begins with what the button shows, so that it can be called by that. */
function retryName(name: string, on: string, word: string): string {
  return word === "Retry" ? `Retry ${name} ${on}` : `${word}: ${name} ${on}`;
}

/** Asks again for one node's part: a failed one of an operation that has ended, or at once for one that waits. */
export function TargetRetry({ target, name }: { target: Target; name: string }): ReactNode {
  const retrying = useAction(() => retry(target.job, target.nodeID === "" ? [] : [target.nodeID]));
  const failed = hasFailed(target.status) || target.status === "cancelled";
  const word = failed ? "Retry" : "Retry now";
  return (
    <>
      <Button small busy={retrying.busy} aria-label={`${word} ${name} on ${target.name}`} onClick={() => retrying.run()}>
        {word}
      </Button>
      <Problem error={retrying.error} onDismiss={retrying.forget} />
    </>
  );
}

/** The jobs of a request that succeeded. */
function confirmation({ succeeded, input = [] }: Action<readonly Operation[]>): string[] {
  return succeeded ? input.map((operation) => operation.jobID) : [];
}

/** A failure to paste into a report: what, where, why, and the ids. */
export function quote(operation: Operation): string {
  const request = operation.requestID === "" ? "" : `, request ${operation.requestID}`;
  return `${[operation.name, placeOf(operation)].filter(Boolean).join(" ")}: ${operation.error ?? ""} (operation ${operation.jobID}${request})`;
}
