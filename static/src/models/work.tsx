// Work on a model under way, and work that failed.
import type { ReactNode } from "react";
import { Link } from "react-router";
import type { Operation } from "../live/messages";
import { FailureActions, Reason } from "../operations/failure";
import { figures, NextCheck, SilenceNotice, WorkGlyph } from "../operations/lines";
import { useWork } from "../operations/watch";
import { pageOf, phaseOf, phrase, placeOf, sendingOf, stateOf } from "../operations/words";
import { ProgressBar } from "../ui/bars";

/** What it is at, and how far: bytes and time left. */
export function Work({ operation }: { operation: Operation }): ReactNode {
  const pace = useWork().paces.get(operation.jobID);
  const state = stateOf(operation);
  const title = `${phrase(operation, state)} ${operation.name}`;
  const figuresText = figures(operation.currentBytes ?? 0, operation.totalBytes ?? 0, pace);
  return (
    <div className="model-work">
      <div className="row wrap">
        <WorkGlyph state={state} />
        <Link to={pageOf(operation)}>
          {phrase(operation, state)} {placeOf(operation)}
        </Link>
        <span className="muted">
          {sendingOf(operation) || [phaseOf(operation), figuresText].filter(Boolean).join(" · ")} <NextCheck operation={operation} /> <SilenceNotice of={operation} />
        </span>
      </div>
      <div className="row">
        <div className="grow">
          <ProgressBar name={title} value={operation.progress} />
        </div>
        <span className="model-percent">{Math.floor(operation.progress)}%</span>
      </div>
    </div>
  );
}

export function Failure({ operation }: { operation: Operation }): ReactNode {
  return (
    <div className="model-work">
      <div className="row wrap">
        <WorkGlyph state="failed" />
        <Link className="grow" to={pageOf(operation)}>
          {phrase(operation, "failed")} {placeOf(operation)}
        </Link>
        <FailureActions operations={[operation]} small />
      </div>
      <Reason error={operation.error} name={operation.name} />
    </div>
  );
}
