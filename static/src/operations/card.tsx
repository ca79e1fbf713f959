// A card of the Activity page: one piece of work, under way or failed, with its nodes.
import { memo, type ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import type { Operation } from "../live/messages";
import { ProgressBar } from "../ui/bars";
import { CopyButton } from "../ui/copy";
import { Ago } from "../ui/time";
import { CancelButton } from "./cancel";
import { FailureActions, TargetRetry, Reason } from "./failure";
import { NextCheck, SilenceNotice, WorkGlyph } from "./lines";
import { latestTargets, underWay, type Group, type Target } from "./model";
import type { Pace } from "./pace";
import { NodeLink, Targets } from "./targets";
import { progressTimes } from "./silence";
import { hasBar, headline, hasNextCheck, numbers, subjectOf, where } from "./summary";
import { Waves } from "./waves-panel";
import { pageOf, phrase, rests, type State } from "./words";

interface CardProps {
  group: Group;
  /** The job that the address names, "" if none of this card. */
  linkedJob: string;
}

/** Work under way. */
export const ProgressCard = memo(function ProgressCard({ group, pace, linkedJob }: CardProps & { pace: Pace | undefined }): ReactNode {
  const work = underWay(group);
  // An operation is in one section: what failed as a whole is among the failures.
  const failures = new Set(group.failed);
  const targets = work.targets.filter((target) => !failures.has(target.job));
  const figuresText = numbers(work, pace);
  const percent = Math.floor(work.progress);
  return (
    <Card state={work.state} title={headline(work)} speaker={work.speaker} targets={targets} jobs={work.active} where={where({ ...work, targets })}>
      <div className="row wrap work-now">
        <bdi className={rests(work.state) ? "waits" : ""}>{subjectOf(work)}</bdi>
        {hasNextCheck(work) && <NextCheck operation={work.speaker} />}
        {work.state === "running" && <SilenceNotice of={progressTimes(work.active)} />}
        {targets.length === 1 && targets[0] !== undefined && targets[0].file !== "" && <bdi className="name muted">{targets[0].file}</bdi>}
        {figuresText !== "" && <span className="work-figures">{figuresText}</span>}
        {hasBar(work) && <span className="work-percent">{percent}%</span>}
      </div>
      {hasBar(work) && <ProgressBar value={percent} name={`${headline(work)} ${work.name}`} />}
      {work.active.map((job) => (
        <Waves key={job.jobID} operation={job} />
      ))}
      <div className="row wrap">
        {work.active.length > 0 && <CancelButton operations={work.active} />}
        {targets.length === 1 && targets[0]?.status === "retrying" && <TargetRetry target={targets[0]} name={work.name} />}
      </div>
      {targets.length > 1 && <Targets targets={targets} name={work.name} linkedJob={linkedJob} />}
    </Card>
  );
});

/** The failures: one with its reason, or several, a line each. */
export const FailureCard = memo(function FailureCard({ group, linkedJob }: CardProps): ReactNode {
  const targets = latestTargets(group.failed);
  const title = phrase(group.speaker, "failed");
  return (
    <Card state="failed" title={title} speaker={group.speaker} targets={targets} jobs={group.failed} where="">
      {targets.length === 1 && <Reason error={group.speaker.error} name={group.speaker.name} />}
      <FailureActions operations={group.failed} />
      {targets.length > 1 && <Targets targets={targets} name={group.name} linkedJob={linkedJob} />}
    </Card>
  );
});

interface ShellProps {
  state: State;
  title: string;
  speaker: Operation;
  targets: readonly Target[];
  jobs: readonly Operation[];
  where: string;
  children: ReactNode;
}

function Card({ state, title, speaker, targets, jobs, where: at, children }: ShellProps): ReactNode {
  const [target] = targets;
  const alone = targets.length === 1 && target !== undefined;
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
        {targets.length > 1 && <NodesTag number={targets.length} isEveryNode={jobs.some((job) => job.allNodes)} />}
      </div>
      <Facts
        nodeID={alone ? target.nodeID : null}
        node={alone ? target.name : at}
        actor={actors(jobs)}
        since={jobs[0]?.createdAt ?? ""}
        attempts={alone ? speaker.attempts : 0}
        requestID={alone && state !== "failed" ? speaker.requestID : ""}
      />
      {children}
    </article>
  );
}

function NodesTag({ number, isEveryNode }: { number: number; isEveryNode: boolean }): ReactNode {
  return <span className="tag">{isEveryNode ? `all ${count(number, "node")}` : count(number, "node")}</span>;
}

interface FactsProps {
  /** Null if it is on several nodes; `node` then has their number. */
  nodeID: string | null;
  node: string;
  actor: string;
  since: string;
  attempts: number;
  requestID: string;
}

/** The facts that do not change while it runs: nodes, requester, time. */
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
