// The nodes of a piece of work, a line each: open by default while they are few, else behind a button, with counts by
// state and a filter for those that failed. Of a thousand, fifty are drawn until all are asked for.
import { memo, useId, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count, left as timeLeft } from "../lib/format";
import { ProgressBar } from "../ui/bars";
import { Button } from "../ui/button";
import { StatusPill } from "../ui/status";
import { Ago } from "../ui/time";
import { CancelButton, canCancelPart, PartCancel } from "./cancel";
import { canRetry } from "./calls";
import { FailureActions, PartRetry, Reason } from "./failure";
import { NextLook, NoNews } from "./lines";
import { hasFailed, type Part } from "./model";
import { partKey, type Pace } from "./pace";
import { tally } from "./tally";
import { useWork } from "./watch";
import { pageOf } from "./words";

const FEW = 4;
const AT_ONCE = 50;

interface PartsProps {
  parts: readonly Part[];
  name: string;
  target: string;
}

export function Parts({ parts, name, target }: PartsProps): ReactNode {
  const { paces } = useWork();
  const failed = useMemo(() => parts.filter((part) => hasFailed(part.status)), [parts]);
  // What a person chose holds, also when the number of nodes changes.
  const [chosen, setChosen] = useState<boolean | null>(null);
  const [only, setOnly] = useState(false);
  const [all, setAll] = useState(false);
  const id = useId();
  const filtered = only && failed.length > 0 ? failed : parts;
  const sought = filtered.findIndex((part) => part.job.jobID === target);
  const open = chosen ?? (parts.length <= FEW || sought >= 0);
  const shown = all ? filtered.length : Math.max(AT_ONCE, sought + 1);
  return (
    <div className="parts">
      <div className="row wrap">
        <Button small kind="ghost" aria-expanded={open} aria-controls={id} onClick={() => setChosen(!open)}>
          {open ? "Hide nodes" : `Show ${count(parts.length, "node")}`}
        </Button>
        {parts.length > FEW && <span className="muted">{tally(parts)}</span>}
        {open && parts.length > FEW && failed.length > 0 && (
          <Button small className="chip" aria-pressed={only} onClick={() => setOnly(!only)}>
            Failed only ({failed.length})
          </Button>
        )}
      </div>
      <ul id={id} hidden={!open} aria-label={`Nodes of ${name}`}>
        {open && filtered.slice(0, shown).map((part) => <PartLine key={part.id} part={part} name={name} pace={paces.get(partKey(part.job, part.nodeID))} />)}
      </ul>
      {open && filtered.length > shown && (
        <Button small onClick={() => setAll(true)}>
          Show all ({filtered.length})
        </Button>
      )}
    </div>
  );
}

interface LineProps {
  part: Part;
  name: string;
  pace: Pace | undefined;
}

/** Parts are rebuilt with their group, and one report changes one of a thousand: the others are not drawn again. */
function equal(left: LineProps, right: LineProps): boolean {
  if (left.part === right.part) return left.pace === right.pace;
  const { job: before, ...was } = left.part;
  const { job: after, ...is } = right.part;
  const same = (Object.keys(is) as (keyof typeof is)[]).every((key) => was[key] === is[key]);
  return same && left.pace === right.pace && before.jobID === after.jobID && before.status === after.status && before.cancellable === after.cancellable;
}

const PartLine = memo(function PartLine({ part, name, pace }: LineProps): ReactNode {
  const failed = hasFailed(part.status);
  const alone = (part.job.nodes ?? []).length <= 1;
  return (
    <li {...(alone ? { id: `job-${part.job.jobID}`, tabIndex: -1 } : {})} className="part">
      <div className="part-line">
        <StatusPill status={part.status} />
        <NodeLink nodeID={part.nodeID} name={part.name} />
        {!failed && <PartFile part={part} />}
        <PartFigures part={part} name={name} pace={pace} />
        {alone ? <OnlyPartActions part={part} name={name} /> : <PartActions part={part} name={name} />}
      </div>
      {failed && <Reason error={part.error === "" ? undefined : part.error} name={`${name} on ${part.name}`} />}
    </li>
  );
}, equal);

/** Of an operation with one part: what can be done about the operation. */
function OnlyPartActions({ part, name }: { part: Part; name: string }): ReactNode {
  return (
    <>
      {hasFailed(part.status) && <FailureActions operations={[part.job]} small />}
      {part.status === "retrying" && <PartRetry part={part} name={name} />}
      {part.job.cancellable && <CancelButton operations={[part.job]} />}
      <Link to={pageOf(part.job)} aria-label={`Details of ${name} on ${part.name}`}>
        Details
      </Link>
    </>
  );
}

function PartActions({ part, name }: { part: Part; name: string }): ReactNode {
  const again = (hasFailed(part.status) || part.status === "cancelled") && canRetry(part.job);
  return (
    <>
      {(again || part.status === "retrying") && <PartRetry part={part} name={name} />}
      {canCancelPart(part) && <PartCancel part={part} name={name} />}
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

const RESTING: ReadonlySet<Part["status"]> = new Set(["waiting", "retrying", "overdue", "cancelled", "superseded"]);

/** What it is at: the file, or in words why it is not, or what its end has to say. */
function PartFile({ part }: { part: Part }): ReactNode {
  const done = part.status === "success" || part.status === "completed";
  const text = done || RESTING.has(part.status) ? part.reason : part.status === "queued" ? "" : part.file || part.phase;
  return (
    <span className="row wrap grow">
      <bdi className={RESTING.has(part.status) ? "part-reason" : "name muted"} title={text}>
        {text}
      </bdi>
      {part.status === "overdue" && (
        <span className="muted">
          time limit passed <Ago at={part.overdueSince} />
        </span>
      )}
      {part.attempts > 0 && part.status !== "success" && <span className="muted">attempt {part.attempts + 1}</span>}
      {(part.status === "running" || part.status === "downloading") && <NoNews of={part} />}
      {(part.status === "waiting" || part.status === "retrying") && <NextLook operation={{ nextLookAt: part.nextLookAt }} />}
    </span>
  );
}

const MOVING: ReadonlySet<Part["status"]> = new Set(["running", "downloading", "overdue"]);

function PartFigures({ part, name, pace }: LineProps): ReactNode {
  const moving = MOVING.has(part.status);
  const running = moving && part.value > 0 && part.value < 100;
  return (
    <>
      {part.current > 0 && moving && (
        <span className="part-bytes">{part.total > 0 ? `${bytes(part.current)} / ${bytes(part.total)}` : bytes(part.current)}</span>
      )}
      {running && pace?.left !== null && pace !== undefined && <span className="part-bytes">{timeLeft(pace.left)} left</span>}
      {running && (
        <span className="part-progress">
          <span aria-hidden="true">{Math.floor(part.value)}%</span>
          <ProgressBar value={part.value} name={`${name} on ${part.name}`} />
        </span>
      )}
    </>
  );
}
