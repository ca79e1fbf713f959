// The opened strip: a line for each operation, in the order of their groups, up to a limit.
import { memo, type ReactNode } from "react";
import { Link } from "react-router";
import { brief, count } from "../lib/format";
import type { Operation } from "../live/messages";
import { ProgressBar } from "../ui/bars";
import { figures, NextCheck, SilenceNotice, WorkGlyph } from "./lines";
import type { Pace } from "./pace";
import { pageOf, phaseOf, phrase, placeOf, rests, sendingOf, stateOf } from "./words";
import type { Work } from "./watch";

const SHOWN = 30;

export function StripList({ work }: { work: Work }): ReactNode {
  const listed = work.groups.flatMap((group) => [...group.failed, ...group.active]);
  return (
    <div className="strip-list">
      <ul>
        {listed.slice(0, SHOWN).map((operation) => (
          <Line key={operation.jobID} operation={operation} pace={work.paces.get(operation.jobID)} />
        ))}
      </ul>
      <Link to="/app/activity">{listed.length > SHOWN ? `All ${count(listed.length, "operation")} in Activity` : "Open Activity"}</Link>
    </div>
  );
}

const Line = memo(function Line({ operation, pace }: { operation: Operation; pace: Pace | undefined }): ReactNode {
  const state = stateOf(operation);
  const title = `${phrase(operation, state)} ${operation.name}`;
  const numbers = state === "running" && sendingOf(operation) === "" ? figures(operation.currentBytes ?? 0, operation.totalBytes ?? 0, pace) : "";
  return (
    <li className={`strip-row ${state}`}>
      <WorkGlyph state={state} />
      <Link className="name strip-row-name" to={pageOf(operation)} title={title}>
        {phrase(operation, state)} <bdi>{operation.name}</bdi> {placeOf(operation)}
      </Link>
      <bdi className="name grow muted">{state === "failed" ? brief(operation.error ?? "") : phaseOf(operation)}</bdi>
      {rests(state) && <NextCheck operation={operation} />}
      {state === "running" && <SilenceNotice of={operation} />}
      {numbers !== "" && <span className="strip-figures">{numbers}</span>}
      {state === "running" && operation.progress >= 1 && (
        <span className="strip-progress">
          <span aria-hidden="true">{operation.progress}%</span>
          <ProgressBar value={operation.progress} name={title} />
        </span>
      )}
    </li>
  );
});
