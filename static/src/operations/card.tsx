// A card of the Activity page: one piece of work, under way or failed, with its nodes.
import { memo, type ReactNode } from "react";
import { count } from "../lib/format";
import type { Operation } from "../live/messages";
import { ProgressBar } from "../ui/bars";
import { CopyButton } from "../ui/copy";
import { Ago } from "../ui/time";
import { FailureActions, Reason } from "./failure";
import { figures, NextLook, WorkGlyph } from "./lines";
import { latestParts, underWay, type Group, type Part } from "./model";
import type { Pace } from "./pace";
import { NodeLink, Parts } from "./parts";
import { hasBar, headline, looksAgain, what, where } from "./summary";
import { phrase, type State } from "./words";

interface CardProps {
  group: Group;
  /** The job that the address names, "" if none of this card. */
  target: string;
}

/** Work under way. */
export const ProgressCard = memo(function ProgressCard({ group, pace, target }: CardProps & { pace: Pace | undefined }): ReactNode {
  const work = underWay(group);
  const failures = new Set(group.failed);
  const parts = work.parts.filter((part) => !failures.has(part.job));
  const numbers = figures(work.current, work.total, pace);
  const percent = Math.floor(work.progress);
  return (
    <Card state={work.state} title={headline(work)} speaker={work.speaker} parts={parts} jobs={work.active} where={where(work)}>
      <div className="row wrap work-now">
        <bdi className={work.state === "waiting" ? "waits" : ""}>{what(work)}</bdi>
        {looksAgain(work) && <NextLook operation={work.speaker} />}
        {parts.length === 1 && parts[0] !== undefined && parts[0].file !== "" && <bdi className="name muted">{parts[0].file}</bdi>}
        {numbers !== "" && <span className="work-figures">{numbers}</span>}
        {hasBar(work) && <span className="work-percent">{percent}%</span>}
      </div>
      {hasBar(work) && <ProgressBar value={percent} name={`${headline(work)} ${work.name}`} />}
      {parts.length > 1 && <Parts parts={parts} name={work.name} target={target} />}
    </Card>
  );
});

/** What failed: one failure with its reason, or several, a line each. */
export const FailureCard = memo(function FailureCard({ group, target }: CardProps): ReactNode {
  const parts = latestParts(group.failed);
  const one = group.failed.length === 1;
  const title = phrase(group.speaker, "failed");
  return (
    <Card state="failed" title={title} speaker={group.speaker} parts={parts} jobs={group.failed} where="">
      {one && <Reason error={group.speaker.error} name={group.speaker.name} />}
      <FailureActions operations={group.failed} />
      {!one && <Parts parts={parts} name={group.name} target={target} />}
    </Card>
  );
});

interface ShellProps {
  state: State;
  title: string;
  speaker: Operation;
  parts: readonly Part[];
  jobs: readonly Operation[];
  where: string;
  children: ReactNode;
}

function Card({ state, title, speaker, parts, jobs, where: at, children }: ShellProps): ReactNode {
  const [part] = parts;
  const alone = parts.length === 1 && part !== undefined;
  return (
    // A card of several nodes has the anchors on their lines.
    <article className={`work-card ${state}`} {...(alone ? { id: `job-${part.job.jobID}`, tabIndex: -1 } : {})}>
      <div className="row">
        <WorkGlyph state={state} />
        <h3 className="name" title={speaker.fullName}>
          {title} <bdi>{speaker.name}</bdi>
        </h3>
        {!alone && parts.length > 1 && <span className="tag">{count(parts.length, "node")}</span>}
      </div>
      <Facts
        nodeID={alone ? part.nodeID : null}
        node={alone ? part.name : at}
        actor={actors(jobs)}
        since={jobs[0]?.createdAt ?? ""}
        attempts={alone ? speaker.attempts : 0}
        requestID={alone && state !== "failed" ? speaker.requestID : ""}
      />
      {children}
    </article>
  );
}

interface FactsProps {
  /** Null if it is on several nodes; `node` says then on how many. */
  nodeID: string | null;
  node: string;
  actor: string;
  since: string;
  attempts: number;
  requestID: string;
}

/** What does not change while it runs: where, who asked, since when. */
const Facts = memo(function Facts({ nodeID, node, actor, since, attempts, requestID }: FactsProps): ReactNode {
  return (
    <div className="row wrap work-facts muted">
      {nodeID !== null ? <NodeLink nodeID={nodeID} name={node} /> : node !== "" && <span>{node}</span>}
      <span className="row">
        requested by <bdi className="name">{actor}</bdi>
      </span>
      <span>
        <Ago at={since} />
      </span>
      {attempts > 0 && <span>attempt {attempts + 1}</span>}
      {requestID !== "" && <CopyButton small text={requestID} label="Copy request ID" />}
    </div>
  );
});

function actors(jobs: readonly Operation[]): string {
  const names = [...new Set(jobs.map((job) => job.actor))];
  return names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
}
