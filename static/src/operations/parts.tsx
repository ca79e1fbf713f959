// The nodes of a piece of work, a line each: open by default while they are few, else behind a button.
import { memo, useId, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count } from "../lib/format";
import { ProgressBar } from "../ui/bars";
import { Button } from "../ui/button";
import { StatusPill } from "../ui/status";
import { FailureActions, Reason } from "./failure";
import { NextLook } from "./lines";
import type { Part } from "./model";
import { stateOf } from "./words";

const FEW = 4;
const AT_ONCE = 50;

export function Parts({ parts, name, target }: { parts: readonly Part[]; name: string; target: string }): ReactNode {
  const sought = parts.findIndex((part) => part.job.jobID === target);
  // What a person chose holds, whatever the number of nodes becomes.
  const [chosen, setChosen] = useState<boolean | null>(null);
  const [limit, setLimit] = useState(AT_ONCE);
  const id = useId();
  const open = chosen ?? (parts.length <= FEW || sought >= 0);
  const shown = Math.max(limit, sought + 1);
  return (
    <div className="parts">
      <Button small kind="ghost" aria-expanded={open} aria-controls={id} onClick={() => setChosen(!open)}>
        {open ? "Hide nodes" : `Show ${count(parts.length, "node")}`}
      </Button>
      <ul id={id} hidden={!open} aria-label={`Nodes of ${name}`}>
        {open && parts.slice(0, shown).map((part) => <PartLine key={part.id} part={part} name={name} />)}
      </ul>
      {open && parts.length > shown && (
        <Button small onClick={() => setLimit(shown + AT_ONCE)}>
          Show more ({parts.length - shown})
        </Button>
      )}
    </div>
  );
}

function equal(left: { part: Part }, right: { part: Part }): boolean {
  // Parts are rebuilt with their group; an operation that did not change keeps its identity.
  return left.part.job === right.part.job && left.part.id === right.part.id;
}

const PartLine = memo(function PartLine({ part, name }: { part: Part; name: string }): ReactNode {
  const failed = part.job.status === "failed";
  return (
    <li id={`job-${part.job.jobID}`} tabIndex={-1} className="part">
      <div className="part-line">
        {part.status === "waiting" ? <span className="pill warn">waiting</span> : <StatusPill status={part.status} />}
        <NodeLink nodeID={part.nodeID} name={part.name} />
        {failed ? <FailureActions operations={[part.job]} small /> : <PartFile part={part} />}
        <PartFigures part={part} name={name} />
      </div>
      {failed && <Reason error={part.job.error} name={part.job.name} />}
    </li>
  );
}, equal);

export function NodeLink({ nodeID, name }: { nodeID: string; name: string }): ReactNode {
  if (nodeID === "") return <span className="muted">no node assigned</span>;
  return (
    <Link className="name part-node" to={`/app/nodes/${nodeID}`} title={name}>
      {name === "" ? nodeID : name}
    </Link>
  );
}

function PartFile({ part }: { part: Part }): ReactNode {
  const waiting = stateOf(part.job) === "waiting";
  return (
    <span className="row grow">
      <bdi className="name muted" title={part.file}>
        {waiting ? part.job.message : part.file || part.phase}
      </bdi>
      {waiting && <NextLook operation={part.job} />}
    </span>
  );
}

function PartFigures({ part, name }: { part: Part; name: string }): ReactNode {
  const running = part.job.status === "processing" && part.value > 0 && part.value < 100;
  return (
    <>
      {part.current > 0 && part.status !== "success" && (
        <span className="part-bytes">{part.total > 0 ? `${bytes(part.current)} / ${bytes(part.total)}` : bytes(part.current)}</span>
      )}
      {running && (
        <span className="part-progress">
          <span aria-hidden="true">{Math.floor(part.value)}%</span>
          <ProgressBar value={part.value} name={`${name} on ${part.name}`} />
        </span>
      )}
    </>
  );
}
