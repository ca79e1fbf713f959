// Running and failed operations of the node that are not dismissed: this node's target of each.
import { useMemo, type ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../../lib/format";
import { useLive } from "../../live/hooks";
import type { Operation } from "../../live/messages";
import { isActive, needsAttention } from "../../live/store";
import { Reason } from "../../operations/failure";
import { figures, NextCheck, SilenceNotice, WorkGlyph } from "../../operations/lines";
import { targetsOf, type Target } from "../../operations/model";
import { pageOf, phaseOf, phrase, stateOf } from "../../operations/words";
import { ProgressBar } from "../../ui/bars";
import { StatusPill } from "../../ui/status";
import { Panel } from "./panel";
import { concerns } from "./words";

/** The node's operations that are under way or want somebody's attention, oldest first. */
export function useOperations(id: string): readonly Operation[] {
  const operations = useLive((state) => state.operations);
  return useMemo(
    () => [...operations.values()].filter((operation) => concerns(operation, id) && (isActive(operation) || needsAttention(operation))),
    [operations, id],
  );
}

export function Running({ id, operations }: { id: string; operations: readonly Operation[] }): ReactNode {
  if (operations.length === 0) return null;
  return (
    <Panel title="Operations" aside={<Link to="/app/activity">Activity</Link>}>
      <ul className="nd-operations">
        {operations.map((operation) => (
          <Row key={operation.jobID} id={id} operation={operation} />
        ))}
      </ul>
    </Panel>
  );
}

function Row({ id, operation }: { id: string; operation: Operation }): ReactNode {
  const state = stateOf(operation);
  const targets = targetsOf(operation);
  const mine = targets.find((target) => target.nodeID === id) ?? targets[0];
  const error = mine?.error || operation.error || "";
  return (
    <li>
      <div className="row wrap">
        <WorkGlyph state={state} />
        <span className="grow">
          <Link to={pageOf(operation)}>
            {phrase(operation, state)} <bdi>{operation.name}</bdi>
          </Link>
          <span className="muted">
            {" "}
            by <bdi>{operation.actor}</bdi>
          </span>
        </span>
        {mine !== undefined && targets.length > 1 && <StatusPill status={mine.status} />}
      </div>
      {mine !== undefined && isActive(operation) && hasEnded(mine) && <OtherTargets targets={targets} />}
      {mine !== undefined && isActive(operation) && !hasEnded(mine) && <Progress operation={operation} target={mine} />}
      {error !== "" && <Reason error={error} name={operation.name} />}
    </li>
  );
}

function hasEnded(target: Target): boolean {
  return target.status === "success" || target.status === "error";
}

/** This node's part is over; what the operation still does, it does on others. */
function OtherTargets({ targets }: { targets: readonly Target[] }): ReactNode {
  const ended = targets.filter(hasEnded).length;
  return (
    <p className="muted">
      Finished on this node. {ended} of {count(targets.length, "node")} finished.
    </p>
  );
}

function Progress({ operation, target }: { operation: Operation; target: Target }): ReactNode {
  return (
    <>
      <div className="row">
        <div className="grow">
          <ProgressBar name={`${phrase(operation, stateOf(operation))} ${operation.name}`} value={target.value} />
        </div>
        <span>{Math.floor(target.value)}%</span>
      </div>
      <div className="muted row wrap">
        <span>{phaseOf(operation)}</span>
        {target.file !== "" && <bdi>{target.file}</bdi>}
        <span>{figures(target.current, target.total, undefined)}</span>
        <NextCheck operation={operation} />
        <SilenceNotice of={target} />
      </div>
    </>
  );
}
