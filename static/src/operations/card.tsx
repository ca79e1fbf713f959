// A card of the Activity page: one piece of work, under way or failed, with its nodes.
import { memo, type ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import type { Operation } from "../live/messages";
import { ProgressBar } from "../ui/bars";
import { CopyButton } from "../ui/copy";
import { Ago } from "../ui/time";
import { CancelButton } from "./cancel";
import { FailureActions, PartRetry, Reason } from "./failure";
import { NextLook, NoNews, WorkGlyph } from "./lines";
import { latestParts, underWay, type Group, type Part } from "./model";
import type { Pace } from "./pace";
import { NodeLink, Parts } from "./parts";
import { newsOf } from "./silence";
import { hasBar, headline, looksAgain, numbers, what, where } from "./summary";
import { Waves } from "./waves-panel";
import { pageOf, phrase, rests, type State } from "./words";

interface CardProps {
  group: Group;
  /** The job that the address names, "" if none of this card. */
  target: string;
}

/** Work under way. */
export const ProgressCard = memo(function ProgressCard({ group, pace, target }: CardProps & { pace: Pace | undefined }): ReactNode {
  const work = underWay(group);
  // An operation is in one section: what failed as a whole is among the failures.
  const failures = new Set(group.failed);
  const parts = work.parts.filter((part) => !failures.has(part.job));
  const told = numbers(work, pace);
  const percent = Math.floor(work.progress);
  return (
    <Card state={work.state} title={headline(work)} speaker={work.speaker} parts={parts} jobs={work.active} where={where({ ...work, parts })}>
      <div className="row wrap work-now">
        <bdi className={rests(work.state) ? "waits" : ""}>{what(work)}</bdi>
        {looksAgain(work) && <NextLook operation={work.speaker} />}
        {work.state === "running" && <NoNews of={newsOf(work.active)} />}
        {parts.length === 1 && parts[0] !== undefined && parts[0].file !== "" && <bdi className="name muted">{parts[0].file}</bdi>}
        {told !== "" && <span className="work-figures">{told}</span>}
        {hasBar(work) && <span className="work-percent">{percent}%</span>}
      </div>
      {hasBar(work) && <ProgressBar value={percent} name={`${headline(work)} ${work.name}`} />}
      {work.active.map((job) => (
        <Waves key={job.jobID} operation={job} />
      ))}
      <div className="row wrap">
        {work.active.length > 0 && <CancelButton operations={work.active} />}
        {parts.length === 1 && parts[0]?.status === "retrying" && <PartRetry part={parts[0]} name={work.name} />}
      </div>
      {parts.length > 1 && <Parts parts={parts} name={work.name} target={target} />}
    </Card>
  );
});

/** What failed: one failure with its reason, or several, a line each. */
export const FailureCard = memo(function FailureCard({ group, target }: CardProps): ReactNode {
  const parts = latestParts(group.failed);
  const title = phrase(group.speaker, "failed");
  return (
    <Card state="failed" title={title} speaker={group.speaker} parts={parts} jobs={group.failed} where="">
      {parts.length === 1 && <Reason error={group.speaker.error} name={group.speaker.name} />}
      <FailureActions operations={group.failed} />
      {parts.length > 1 && <Parts parts={parts} name={group.name} target={target} />}
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
  const anchored = jobs.length === 1 || alone ? { id: `job-${jobs[0]?.jobID ?? ""}`, tabIndex: -1 } : {};
  return (
    // A card of several operations has the anchors on their lines.
    <article className={`work-card ${state}`} {...anchored}>
      <div className="row">
        <WorkGlyph state={state} />
        <h3 className="name" title={speaker.fullName}>
          {jobs.length === 1 ? (
            <Link to={pageOf(speaker)}>
              {title} <bdi>{speaker.name}</bdi>
            </Link>
          ) : (
            <>
              {title} <bdi>{speaker.name}</bdi>
            </>
          )}
        </h3>
        {parts.length > 1 && <NodesTag number={parts.length} all={jobs.some((job) => job.allNodes)} />}
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

function NodesTag({ number, all }: { number: number; all: boolean }): ReactNode {
  return <span className="tag">{all ? `all ${count(number, "node")}` : count(number, "node")}</span>;
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
