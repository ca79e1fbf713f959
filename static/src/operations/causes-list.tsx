// The causes of failures, a line each, which opens to its nodes: a few are open from the start, many are virtual rows.
import { useVirtualizer } from "@tanstack/react-virtual";
import { useId, useRef, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { Button } from "../ui/button";
import { Problem } from "../ui/problem";
import { canRetry, dismiss, retry } from "./calls";
import { numberOf, type Cause } from "./causes";
import { Reason, TargetRetry } from "./failure";
import type { Target } from "./model";
import { NodeLink } from "./targets";
import { pageOf } from "./words";

const FEW = 4;
/** Rows up to which all are in the document. */
const PLAIN = 20;
const ROW_HEIGHT = 60;

interface CausesProps {
  causes: readonly Cause[];
  /** The subject of the operations, for assistive tech. */
  name: string;
  /** True if the failures are those of several operations. */
  isSeveral: boolean;
  /** False: nothing can be done about them any more. */
  actions?: boolean;
}

export function Causes({ causes, name, isSeveral, actions = true }: CausesProps): ReactNode {
  const total = causes.reduce((sum, cause) => sum + cause.targets.length, 0);
  return (
    <ul className="causes" aria-label={`Causes of the failure of ${name}`}>
      {causes.map((cause) => (
        <CauseLine key={cause.text} {...{ cause, name, isSeveral, actions }} isAlone={causes.length === 1} isOpen={total <= FEW} />
      ))}
    </ul>
  );
}

interface LineProps {
  cause: Cause;
  name: string;
  isSeveral: boolean;
  actions: boolean;
  /** The actions on the whole card are those on this cause. */
  isAlone: boolean;
  isOpen: boolean;
}

function CauseLine({ cause, name, isSeveral, actions, isAlone, isOpen }: LineProps): ReactNode {
  // A person's choice stays when the number of nodes changes.
  const [chosen, setChosen] = useState<boolean | null>(null);
  const open = chosen ?? isOpen;
  const id = useId();
  return (
    <li className="cause">
      <div className="row wrap">
        <button type="button" className="cause-toggle" aria-expanded={open} aria-controls={id} onClick={() => setChosen(!open)}>
          <span aria-hidden="true">{open ? "▾" : "▸"}</span> <strong>{numberOf(cause.targets, isSeveral)}</strong>: <bdi>{cause.text}</bdi>
        </button>
        {actions && !isAlone && !isSeveral && <CauseActions cause={cause} name={name} />}
      </div>
      <div id={id} hidden={!open}>
        {open && <Rows {...{ cause, name, isSeveral, actions }} />}
      </div>
    </li>
  );
}

/** What can be done about the nodes of one operation that have this cause. */
function CauseActions({ cause: { text, targets }, name }: { cause: Cause; name: string }): ReactNode {
  const [first] = targets;
  const nodeIDs = targets.map((target) => target.nodeID);
  const onFirst = async (act: (job: Target["job"]) => Promise<unknown>) => (first === undefined ? undefined : act(first.job));
  const retrying = useAction(() => onFirst((job) => retry(job, nodeIDs)), `${name} requested again`);
  const dismissing = useAction(() => onFirst((job) => dismiss(job, "", nodeIDs)), `${numberOf(targets, false)} dismissed`);
  if (first === undefined) return null;
  return (
    <>
      {canRetry(first.job) && (
        <Button small busy={retrying.busy} aria-label={`Retry (${targets.length}): ${text}`} onClick={() => retrying.run()}>
          Retry ({targets.length})
        </Button>
      )}
      <Button small busy={dismissing.busy} aria-label={`Dismiss (${targets.length}): ${text}`} onClick={() => dismissing.run()}>
        Dismiss ({targets.length})
      </Button>
      <Problem error={retrying.error ?? dismissing.error} onDismiss={() => { retrying.forget(); dismissing.forget(); }} />
    </>
  );
}

type RowsProps = Pick<LineProps, "cause" | "name" | "isSeveral" | "actions">;

function Rows(props: RowsProps): ReactNode {
  const { cause, name } = props;
  if (cause.targets.length > PLAIN) return <VirtualRows {...props} />;
  return (
    <ul aria-label={`Nodes of ${name}`}>
      {cause.targets.map((target) => (
        <li key={keyOf(target)}>
          <Row target={target} {...props} />
        </li>
      ))}
    </ul>
  );
}

function keyOf(target: Target | undefined): string | undefined {
  return target && `${target.job.jobID} ${target.id}`;
}

function VirtualRows(props: RowsProps): ReactNode {
  const { targets } = props.cause;
  const scroll = useRef<HTMLDivElement>(null);
  // eslint-disable-next-line react-hooks/incompatible-library -- only this component draws the rows, and it is not memoized
  const virtual = useVirtualizer({ count: targets.length, getScrollElement: () => scroll.current, estimateSize: () => ROW_HEIGHT, getItemKey: (index) => keyOf(targets[index]) ?? index, overscan: 5, useFlushSync: false });
  return (
    // Scrolled by keys as well.
    <div ref={scroll} className="cause-rows" role="group" tabIndex={0} aria-label={`${numberOf(targets, props.isSeveral)}: ${props.cause.text}`}>
      <ul aria-label={`Nodes of ${props.name}`} style={{ height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map(({ index, start, key }) => {
          const target = targets[index];
          return (
            target !== undefined && (
              <li key={key} ref={virtual.measureElement} data-index={index} aria-setsize={targets.length} aria-posinset={index + 1} style={{ transform: `translateY(${start}px)` }}>
                <Row target={target} {...props} />
              </li>
            )
          );
        })}
      </ul>
    </div>
  );
}

function Row({ target, name, isSeveral, actions }: RowsProps & { target: Target }): ReactNode {
  return (
    <div className="cause-row">
      <div className="part-line">
        {isSeveral && (
          <Link className="name" to={pageOf(target.job)}>
            <bdi>{target.job.name}</bdi>
          </Link>
        )}
        {(target.nodeID !== "" || !isSeveral) && <NodeLink nodeID={target.nodeID} name={target.name} />}
        <span className="grow" />
        {actions && canRetry(target.job) && <TargetRetry target={target} name={isSeveral ? target.job.name : name} />}
        {actions && isSeveral && <RowDismiss target={target} />}
      </div>
      <Reason error={target.error === "" ? undefined : target.error} name={`${target.job.name} on ${target.name}`} />
    </div>
  );
}

/** Dismisses this failure only; the failures of the operation on other nodes stay. */
function RowDismiss({ target: { job, name, nodeID } }: { target: Target }): ReactNode {
  const dismissing = useAction(() => dismiss(job, "", (job.nodes ?? []).length > 1 ? [nodeID] : []));
  return (
    <>
      <Button small busy={dismissing.busy} aria-label={`Dismiss ${job.name} on ${name}`} onClick={() => dismissing.run()}>
        Dismiss
      </Button>
      <Problem error={dismissing.error} onDismiss={dismissing.forget} />
    </>
  );
}
