// Operations that have ended since the page was opened, a line each.
import { memo, type ReactNode } from "react";
import { Link } from "react-router";
import { brief, duration } from "../lib/format";
import type { Operation } from "../live/messages";
import { Ago } from "../ui/time";
import { tookOf } from "./filter";
import { WorkGlyph } from "./lines";
import { noun, outcome, outcomePlace, pageOf, stateOf } from "./words";

export const EndedLine = memo(function EndedLine({ operation }: { operation: Operation }): ReactNode {
  return (
    <li id={`job-${operation.jobID}`} tabIndex={-1} className="ended-line">
      <WorkGlyph state={stateOf(operation)} />
      <span className="name ended-name">
        <Link to={pageOf(operation)} title={operation.fullName}>
          <bdi>{operation.name}</bdi>
        </Link>{" "}
        <span className="muted">{noun(operation)}</span>
      </span>
      <span className="name grow">
        {outcome(operation, duration(tookOf(operation)))} <bdi>{outcomePlace(operation)}</bdi>
        {operation.status === "failed" && (
          <span className="muted">
            : <bdi>{brief(operation.error ?? "")}</bdi>
          </span>
        )}
      </span>
      <bdi className="name muted ended-actor">{operation.actor}</bdi>
      <span className="muted">
        <Ago at={operation.finishedAt} />
      </span>
    </li>
  );
});
