// The nodes of a piece of work, a line each: open by default while they are few, else behind a button, with counts by
// state and a filter for those that failed. Of a thousand, fifty are drawn, and more on request.
import { memo, useId, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count, formatTimeLeft as timeLeft } from "../lib/format";
import { ProgressBar } from "../ui/bars";
import { Button } from "../ui/button";
import { StatusPill } from "../ui/status";
import { Ago } from "../ui/time";
import { CancelButton, canCancelTarget, TargetCancel } from "./cancel";
import { canRetry } from "./calls";
import { FailureActions, TargetRetry, Reason } from "./failure";
import { NextCheck, SilenceNotice } from "./lines";
import { hasFailed, type Target } from "./model";
import { targetKey, type Pace } from "./pace";
import { tally } from "./tally";
import { useWork } from "./watch";
import { pageOf } from "./words";

const FEW = 4;
const AT_ONCE = 50;
const MORE = 200;

interface TargetsProps {
  targets: readonly Target[];
  name: string;
  linkedJob: string;
}

export function Targets({ targets, name, linkedJob }: TargetsProps): ReactNode {
  const { paces } = useWork();
  const failed = useMemo(() => targets.filter((target) => hasFailed(target.status)), [targets]);
  // A person's choice stays when the number of nodes changes.
  const [chosen, setChosen] = useState<boolean | null>(null);
  const [only, setOnly] = useState(false);
  const [limit, setLimit] = useState(AT_ONCE);
  const id = useId();
  const filtered = only && failed.length > 0 ? failed : targets;
  const sought = filtered.findIndex((target) => target.job.jobID === linkedJob);
  const open = chosen ?? (targets.length <= FEW || sought >= 0);
  const shown = Math.max(limit, sought + 1);
  return (
    <div className="parts">
      <div className="row wrap">
        <Button small kind="ghost" aria-expanded={open} aria-controls={id} onClick={() => setChosen(!open)}>
          {open ? "Hide nodes" : `Show ${count(targets.length, "node")}`}
        </Button>
        {targets.length > FEW && <span className="muted">{tally(targets)}</span>}
        {open && targets.length > FEW && failed.length > 0 && (
          <Button small className="chip" aria-pressed={only} onClick={() => setOnly(!only)}>
            Failed only ({failed.length})
          </Button>
        )}
      </div>
      <ul id={id} hidden={!open} aria-label={`Nodes of ${name}`}>
        {open && filtered.slice(0, shown).map((target) => <TargetLine key={target.id} target={target} name={name} pace={paces.get(targetKey(target.job, target.nodeID))} />)}
      </ul>
      {open && filtered.length > shown && (
        <Button small onClick={() => setLimit(shown + MORE)}>
          Show more ({filtered.length - shown})
        </Button>
      )}
    </div>
  );
}

interface LineProps {
  target: Target;
  name: string;
  pace: Pace | undefined;
}

/** Parts are rebuilt with their group, and one report changes one of a thousand: the others are not drawn again. */
function equal(left: LineProps, right: LineProps): boolean {
  if (left.target === right.target) return left.pace === right.pace;
  const { job: previous, ...was } = left.target;
  const { job: after, ...is } = right.target;
  const same = (Object.keys(is) as (keyof typeof is)[]).every((key) => was[key] === is[key]);
  return same && left.pace === right.pace && previous.jobID === after.jobID && previous.status === after.status && previous.cancellable === after.cancellable;
}

const TargetLine = memo(function TargetLine({ target, name, pace }: LineProps): ReactNode {
  const failed = hasFailed(target.status);
  const alone = (target.job.nodes ?? []).length <= 1;
  return (
    <li {...(alone ? { id: `job-${target.job.jobID}`, tabIndex: -1 } : {})} className="part">
      <div className="part-line">
        <StatusPill status={target.status} />
        <NodeLink nodeID={target.nodeID} name={target.name} />
        {!failed && <TargetFile target={target} />}
        <TargetFigures target={target} name={name} pace={pace} />
        {alone ? <OnlyTargetActions target={target} name={name} /> : <TargetActions target={target} name={name} />}
      </div>
      {failed && <Reason error={target.error === "" ? undefined : target.error} name={`${name} on ${target.name}`} />}
    </li>
  );
}, equal);

/** Of an operation with one part: what can be done about the operation. */
function OnlyTargetActions({ target, name }: { target: Target; name: string }): ReactNode {
  return (
    <>
      {hasFailed(target.status) && <FailureActions operations={[target.job]} small />}
      {target.status === "retrying" && <TargetRetry target={target} name={name} />}
      {target.job.cancellable && <CancelButton operations={[target.job]} />}
      <Link to={pageOf(target.job)} aria-label={`Details of ${name} on ${target.name}`}>
        Details
      </Link>
    </>
  );
}

function TargetActions({ target, name }: { target: Target; name: string }): ReactNode {
  const isRetryable = (hasFailed(target.status) || target.status === "cancelled") && canRetry(target.job);
  return (
    <>
      {(isRetryable || target.status === "retrying") && <TargetRetry target={target} name={name} />}
      {canCancelTarget(target) && <TargetCancel target={target} name={name} />}
    </>
  );
}

export function NodeLink({ nodeID, name }: { nodeID: string; name: string }): ReactNode {
  if (nodeID === "") return <span className="muted">no node assigned</span>;
  return (
    <Link className="name part-node" to={`/app/nodes/${nodeID}`} title={name}>
      {name === "" ? nodeID : name}
    </Link>
  );
}

const RESTING: ReadonlySet<Target["status"]> = new Set(["waiting", "retrying", "overdue", "cancelled", "superseded"]);

/** The current file, or the reason of the wait, or the outcome. */
function TargetFile({ target }: { target: Target }): ReactNode {
  const done = target.status === "success" || target.status === "completed";
  const text = done || RESTING.has(target.status) ? target.reason : target.status === "queued" ? "" : target.file || target.phase;
  return (
    <span className="row wrap grow">
      <bdi className={RESTING.has(target.status) ? "part-reason" : "name muted"} title={text}>
        {text}
      </bdi>
      {target.status === "overdue" && (
        <span className="muted">
          time limit passed <Ago at={target.overdueSince} />
        </span>
      )}
      {target.attempts > 0 && target.status !== "success" && <span className="muted">attempt {target.attempts + 1}</span>}
      {(target.status === "running" || target.status === "downloading") && <SilenceNotice of={target} />}
      {(target.status === "waiting" || target.status === "retrying") && <NextCheck operation={{ nextLookAt: target.nextLookAt }} />}
    </span>
  );
}

const MOVING: ReadonlySet<Target["status"]> = new Set(["running", "downloading", "overdue"]);

function TargetFigures({ target, name, pace }: LineProps): ReactNode {
  const moving = MOVING.has(target.status);
  const running = moving && target.value > 0 && target.value < 100;
  return (
    <>
      {target.current > 0 && moving && (
        <span className="part-bytes">{target.total > 0 ? `${bytes(target.current)} / ${bytes(target.total)}` : bytes(target.current)}</span>
      )}
      {running && pace?.secondsLeft !== null && pace !== undefined && <span className="part-bytes">{timeLeft(pace.secondsLeft)} left</span>}
      {running && (
        <span className="part-progress">
          <span aria-hidden="true">{Math.floor(target.value)}%</span>
          <ProgressBar value={target.value} name={`${name} on ${target.name}`} />
        </span>
      )}
    </>
  );
}
