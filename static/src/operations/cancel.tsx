// Cancelling: a button where it applies, and a question that says what each worker will make of it.
import { useState, type ReactNode } from "react";
import { useAction } from "../api/action";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import type { LiveNode, Operation } from "../live/messages";
import { isActive } from "../live/store";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { cancelAll, cancelOn } from "./calls";
import { targetsOf, type Target } from "./model";
import { ENDED, phrase, placeOf, stateOf } from "./words";

const WAITING: ReadonlySet<Target["status"]> = new Set(["queued", "waiting", "retrying"]);

/** Why it cannot be cancelled; "" if it can. */
export function cancelRefusal(operations: readonly Operation[]): string {
  if (operations.some((operation) => operation.cancellable)) return "";
  if (operations.some((operation) => operation.isDeletion)) return "A removal that has started cannot be cancelled";
  return "Cannot be cancelled now";
}

/** For one operation, or for several, whatever they are. */
export function CancelButton({ operations }: { operations: readonly Operation[] }): ReactNode {
  const [open, setOpen] = useState(false);
  const [first] = operations;
  if (first === undefined) return null;
  const alone = operations.length === 1;
  // Beside the choice to stop after a wave.
  const verb = first.waves === undefined ? "Cancel" : "Cancel now";
  return (
    <>
      <Button small refusal={open ? "" : cancelRefusal(operations)} {...(alone ? { "aria-label": `${verb}: ${phrase(first, stateOf(first))} ${first.name} ${placeOf(first)}` } : {})} onClick={() => setOpen(true)}>
        {alone ? `${verb}…` : `Cancel all (${operations.length})…`}
      </Button>
      {open && <CancelQuestion operations={operations} first={first} onClose={() => setOpen(false)} />}
    </>
  );
}

/** True if this node's target can be cancelled alone; a removal that has begun cannot. */
export function canCancelTarget({ job, status }: Target): boolean {
  if (!job.isBackend || !isActive(job) || ENDED.has(status)) return false;
  return !job.isDeletion || WAITING.has(status);
}

/** Ends one node's part, after a question. */
export function TargetCancel({ target, name }: { target: Target; name: string }): ReactNode {
  const [open, setOpen] = useState(false);
  const nodes = useLive((state) => state.nodes);
  const cancellation = useAction(
    () => cancelOn(target.job, target.nodeID),
    () => {
      announce(`Cancelled ${name} on ${target.name}`);
      setOpen(false);
    },
  );
  const effect = effectOf([target], nodes);
  return (
    <>
      <Button small aria-label={`Cancel ${name} on ${target.name}`} onClick={() => setOpen(true)}>
        Cancel…
      </Button>
      {open && (
        <Confirm open onClose={() => setOpen(false)} title={<>Cancel <bdi>{name}</bdi> on <bdi>{target.name}</bdi> only</>} action="Cancel on this node" back="Keep it" danger busy={cancellation.busy} error={cancellation.error} onConfirm={() => cancellation.run()}>
          <ul className="effects">
            <Effects effect={effect} />
            <li>The other nodes continue.</li>
            {target.job.waves !== undefined && <li>No further wave starts until you continue or stop the upgrade.</li>}
          </ul>
        </Confirm>
      )}
    </>
  );
}

function Effects({ effect }: { effect: Effect }): ReactNode {
  return (
    <>
      {effect.ours.length > 0 && (
        <li>
          {named(effect.ours)}: the worker stops, removes its temporary files and confirms within 5 seconds.
        </li>
      )}
      {effect.stock.length > 0 && (
        <li>
          {named(effect.stock)}: a stock LocalAI worker cannot be stopped. It continues, and its result is discarded.
        </li>
      )}
      {effect.others && <li>The operation stops. What it has done stays.</li>}
      {effect.waiting > 0 && <li>{count(effect.waiting, "node")} not started: no command is sent.</li>}
    </>
  );
}

interface QuestionProps {
  operations: readonly Operation[];
  first: Operation;
  onClose: () => void;
}

function CancelQuestion({ operations, first, onClose }: QuestionProps): ReactNode {
  const nodes = useLive((state) => state.nodes);
  // Those that the question is about: what starts meanwhile was not asked about.
  const [asked] = useState(() => new Set(operations.filter(isCancellable).map(({ jobID }) => jobID)));
  const cancellable = operations.filter((operation) => asked.has(operation.jobID) && isCancellable(operation));
  const cancellation = useAction(
    () => cancelAll(cancellable),
    (counts) => {
      announce(operations.length > 1 ? counts : `${first.name}: ${counts}`);
      onClose();
    },
  );
  const effect = effectOf(cancellable.flatMap(targetsOf), nodes);
  const title =
    operations.length > 1 ? (
      `Cancel ${count(asked.size, "operation")}`
    ) : (
      <>
        Cancel {phrase(first, stateOf(first)).replace(/^./, (letter) => letter.toLowerCase())} <bdi>{first.name}</bdi> {placeOf(first)}
      </>
    );
  return (
    <Confirm open onClose={onClose} title={title} action={operations.length > 1 ? `Cancel ${count(cancellable.length, "operation")}` : "Cancel operation"} back="Keep it" danger busy={cancellation.busy} error={cancellation.error} onConfirm={() => cancellation.run()}>
      <ul className="effects">
        {cancellable.length === 0 && <li>It has finished or can no longer be cancelled.</li>}
        <Effects effect={effect} />
        {effect.done > 0 && <li>{count(effect.done, "node")} done: nothing is undone.</li>}
        <li>Cancelling is final. You can request it again in History.</li>
      </ul>
    </Confirm>
  );
}

function isCancellable(operation: Operation): boolean {
  return isActive(operation) && operation.cancellable;
}

interface Effect {
  /** Names of nodes with a worker of ours that may be at it. */
  ours: string[];
  stock: string[];
  /** True if something stops that is no work on a backend of a known node, such as an import or a load. */
  others: boolean;
  waiting: number;
  done: number;
}

/** The consequence of a cancellation for each target. A stock worker has no secret of its own; ours always has. */
export function effectOf(targets: readonly Target[], nodes: ReadonlyMap<string, Pick<LiveNode, "weak_identity">>): Effect {
  const effect: Effect = { ours: [], stock: [], others: false, waiting: 0, done: 0 };
  for (const target of targets) {
    if (ENDED.has(target.status)) effect.done += target.status === "success" ? 1 : 0;
    else if (WAITING.has(target.status)) effect.waiting += 1;
    else if (!target.job.isBackend || !nodes.has(target.nodeID)) effect.others = true;
    else if (nodes.get(target.nodeID)?.weak_identity === false) effect.ours.push(target.name);
    else effect.stock.push(target.name);
  }
  return effect;
}

function named(names: readonly string[]): ReactNode {
  const shown = names.slice(0, 3).join(", ");
  return <bdi>{names.length > 3 ? `${shown} and ${names.length - 3} more` : shown}</bdi>;
}
