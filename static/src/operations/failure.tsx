// What can be done about a failure, where it is shown: ask again, put it away, quote it.
import { useMutation } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { brief, count } from "../lib/format";
import type { Operation } from "../live/messages";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy";
import { Problem } from "../ui/problem";
import { canRetry, dismiss, inTurn, retry } from "./calls";

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

/** Buttons for one failed operation, or for several of the same kind; each acts on its own jobs. */
export function FailureActions({ operations, small = false }: { operations: readonly Operation[]; small?: boolean }): ReactNode {
  const again = useMutation({ mutationFn: (some: readonly Operation[]) => inTurn(some, retry) });
  const away = useMutation({ mutationFn: (some: readonly Operation[]) => inTurn(some, dismiss) });
  // What was asked for and has come to pass is no answer for a failure that came after it.
  const settled = new Set([...asked(again), ...asked(away)]);
  const left = operations.filter((one) => !settled.has(one.jobID));
  const [first] = operations;
  if (first === undefined) return null;
  const several = operations.length > 1;
  const on = several ? `on ${count(operations.length, "node")}` : `on ${first.nodeName ?? "the node"}`;
  const refusal = left.length === 0 ? ON_ITS_WAY : "";
  const failed = again.error ?? away.error;
  return (
    <>
      <div className="row wrap failure-actions">
        {operations.some(canRetry) && (
          <Button small={small} busy={again.isPending} refusal={refusal} aria-label={`Retry ${first.name} ${on}`} onClick={() => again.mutate(left.filter(canRetry))}>
            {several ? "Retry all" : "Retry"}
          </Button>
        )}
        <Button small={small} busy={away.isPending} refusal={refusal} aria-label={`Dismiss ${first.name} ${on}`} onClick={() => away.mutate(left)}>
          {several ? "Dismiss all" : "Dismiss"}
        </Button>
        {!several && <CopyButton small={small} text={quote(first)} label="Copy error" />}
      </div>
      {failed !== null && (
        <Problem
          error={failed}
          onDismiss={() => {
            again.reset();
            away.reset();
          }}
        />
      )}
    </>
  );
}

/** The jobs of a request that succeeded. */
function asked({ isSuccess, variables }: { isSuccess: boolean; variables: readonly Operation[] | undefined }): string[] {
  return isSuccess ? (variables ?? []).map((one) => one.jobID) : [];
}

function quote(operation: Operation): string {
  const request = operation.requestID === "" ? "" : `, request ${operation.requestID}`;
  return `${operation.name} on ${operation.nodeName ?? "?"}: ${operation.error ?? ""} (operation ${operation.jobID}${request})`;
}
