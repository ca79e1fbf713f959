// The cards of the activity pages: an operation under way with its nodes, and failures with their causes.
import { memo, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import type { Operation } from "../live/messages";
import { ProgressBar } from "../ui/bars";
import { CopyButton } from "../ui/copy";
import { Ago } from "../ui/time";
import { CancelButton } from "./cancel";
import { causesOf, wordsOf, type FailureGroup } from "./causes";
import { Causes } from "./causes-list";
import { FailureActions, TargetRetry, Reason } from "./failure";
import { NextCheck, SilenceNotice, WorkGlyph } from "./lines";
import { groups, hasFailed, type Group, type Target } from "./model";
import type { Pace } from "./pace";
import { NodeLink, Targets } from "./targets";
import { progressTimes } from "./silence";
import { hasBar, headline, hasNextCheck, numbers, subjectOf, where } from "./summary";
import { WaveActions, Waves } from "./waves-panel";
import { pageOf, rests, type State } from "./words";

interface ProgressCardProps {
  operation: Operation;
  pace: Pace | undefined;
  /** The job that the address names, "" if not this one. */
  linkedJob: string;
  /** True if no section's heading stands above it. */
  isTop?: boolean;
}

/** An operation under way. */
export const ProgressCard = memo(function ProgressCard({ operation, pace, linkedJob, isTop = false }: ProgressCardProps): ReactNode {
  const work = useGroup(operation);
  if (work === undefined) return null;
  const { targets } = work;
  const failures = targets.filter((target) => hasFailed(target.status));
  return (
    <Card state={work.state} title={headline(work)} operations={[operation]} targets={targets} where={where(work)} isTop={isTop}>
      <Now work={work} operation={operation} pace={pace} />
      <Waves operation={operation} />
      <div className="row wrap">
        <WaveActions operation={operation} />
        <CancelButton operations={[operation]} />
        {targets.length === 1 && targets[0]?.status === "retrying" && <TargetRetry target={targets[0]} name={work.name} />}
      </div>
      {failures.length > 1 && <Causes causes={causesOf([operation])} name={work.name} isSeveral={false} actions={false} />}
      {targets.length > 1 && <Targets targets={targets} name={work.name} linkedJob={linkedJob} />}
    </Card>
  );
});

/** What it is at, and how far. */
function Now({ work, operation, pace }: { work: Group } & Pick<ProgressCardProps, "operation" | "pace">): ReactNode {
  const figuresText = numbers(work, pace);
  const percent = Math.floor(work.progress);
  const file = work.targets.length === 1 ? (work.targets[0]?.file ?? "") : "";
  return (
    <>
      <div className="row wrap work-now">
        <bdi className={rests(work.state) ? "waits" : ""}>{subjectOf(work)}</bdi>
        {hasNextCheck(work) && <NextCheck operation={operation} />}
        {work.state === "running" && <SilenceNotice of={progressTimes([operation])} />}
        {file !== "" && <bdi className="name muted">{file}</bdi>}
        {figuresText !== "" && <span className="work-figures">{figuresText}</span>}
        {hasBar(work) && <span className="work-percent">{percent}%</span>}
      </div>
      {hasBar(work) && <ProgressBar value={percent} name={`${headline(work)} ${work.name}`} />}
    </>
  );
}

/** The operation as a group, whose progress does not go back. */
function useGroup(operation: Operation): Group | undefined {
  const [previous, setPrevious] = useState<Group>();
  const [group] = useMemo(() => groups([operation], new Map(previous === undefined ? [] : [[previous.id, previous]])), [operation, previous]);
  // Drawn again at once: the group of an unchanged operation is the previous one.
  if (group !== previous) setPrevious(group);
  return group;
}

interface FailureCardProps {
  group: FailureGroup;
  /** The job that the address names, "" if none of this card. */
  linkedJob: string;
  /** Chosen, and the way to choose it; absent if nothing is chosen here. */
  selection?: { isSelected: boolean; onSelect: (group: FailureGroup, on: boolean) => void };
  /** True if no section's heading stands above it. */
  isTop?: boolean;
  /** Asks for a comment before the failures are dismissed. */
  onDismiss?: (operations: readonly Operation[]) => void;
}

/** Failures with the same causes: of one operation, or of several. */
export const FailureCard = memo(
  function FailureCard({ group, linkedJob, selection, isTop = false, onDismiss }: FailureCardProps): ReactNode {
    const { operations, causes } = group;
    const { verb, name, where: place } = wordsOf(group);
    const title = [verb, name, place].filter(Boolean).join(" ");
    const targets = causes.flatMap((cause) => cause.targets);
    const [only] = targets;
    const check = selection && <input type="checkbox" aria-label={`Select: ${title}`} checked={selection.isSelected} onChange={(event) => selection.onSelect(group, event.target.checked)} />;
    return (
      <Card state="failed" title={verb} operations={operations} targets={targets} where={place} linkedJob={linkedJob} check={check} isTop={isTop}>
        {targets.length === 1 && only !== undefined ? <Reason error={only.error === "" ? undefined : only.error} name={name} /> : <Causes causes={causes} name={name || count(operations.length, "operation")} isSeveral={operations.length > 1} />}
        <FailureActions operations={operations} {...(onDismiss === undefined ? {} : { onDismiss })} />
      </Card>
    );
  },
  (before, after) =>
    before.group.operations.length === after.group.operations.length &&
    before.group.operations.every((operation, index) => operation === after.group.operations[index]) &&
    before.linkedJob === after.linkedJob &&
    before.selection?.isSelected === after.selection?.isSelected,
);

interface ShellProps {
  state: State;
  title: string;
  /** One, or several that failed for the same causes. */
  operations: readonly Operation[];
  targets: readonly Target[];
  where: string;
  linkedJob?: string;
  check?: ReactNode;
  isTop?: boolean;
  children: ReactNode;
}

function Card({ state, title, operations, targets, where: at, linkedJob = "", check, isTop = false, children }: ShellProps): ReactNode {
  const [first] = operations;
  if (first === undefined) return null;
  const Heading = isTop ? "h2" : "h3";
  const alone = operations.length === 1;
  return (
    <article className={`work-card ${state}`} id={`job-${linkedJob || first.jobID}`} tabIndex={-1}>
      <div className="row">
        {check}
        <WorkGlyph state={state} />
        <Heading className="name" title={first.fullName}>
          <Title state={state} title={title} operations={operations} where={at} />
        </Heading>
        {alone && targets.length > 1 && <NodesTag number={(first.nodes ?? []).length} isEveryNode={first.allNodes === true} />}
      </div>
      <FactsOf state={state} operations={operations} targets={targets} where={at} />
      {children}
    </article>
  );
}

function FactsOf({ state, operations, targets, where: at }: Pick<ShellProps, "state" | "operations" | "targets" | "where">): ReactNode {
  const [first] = operations;
  const [target] = targets;
  if (first === undefined) return null;
  const onOne = operations.length === 1 && targets.length === 1 && target !== undefined;
  return (
      <Facts
        nodeID={onOne ? target.nodeID : null}
        node={onOne ? target.name : state === "failed" ? "" : at}
        actor={actors(operations)}
        since={state === "failed" ? (first.finishedAt ?? first.createdAt) : first.createdAt}
        attempts={onOne ? first.attempts : 0}
        requestID={onOne && state !== "failed" ? first.requestID : ""}
      />
  );
}

function Title({ state, title, operations, where: at }: Pick<ShellProps, "state" | "title" | "operations" | "where">): ReactNode {
  const [first] = operations;
  if (first === undefined) return null;
  if (operations.length > 1)
    return (
      <>
        {title} {operations.every(({ name }) => name === first.name) && <><bdi>{first.name}</bdi> </>}
        {at}
      </>
    );
  return (
    <Link to={pageOf(first)}>
      {title} <bdi>{first.name}</bdi>
      {state === "failed" && at !== "" && <> {at}</>}
    </Link>
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
