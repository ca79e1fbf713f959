// What the tables of backends and the page of one share: the name, the version, the work on it, and what failed.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import type { Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { onBackend } from "../nodes/detail/words";
import { FailureActions, Reason } from "../operations/failure";
import { SilenceNotice } from "../operations/lines";
import { progressTimes } from "../operations/silence";
import { phrase, place, stateOf } from "../operations/words";
import { Tip } from "../ui/tip";
import { backendAddress, FROM_ADDRESS, pendingOf, short, target, versionText, type Row } from "./installed-model";

export function BackendLink({ name }: { name: string }): ReactNode {
  return (
    <Link to={backendAddress(name)}>
      <bdi>{name}</bdi>
    </Link>
  );
}

/** What is unusual about an installed backend. */
export function Marks({ row }: { row: Row }): ReactNode {
  return (
    <>
      {row.upgrade !== null && <span className="pill info">update{target(row.upgrade) === "" ? " available" : ` to ${target(row.upgrade)}`}</span>}
      {row.drifted > 0 && <span className="pill warn">{count(row.drifted, "node differs", "nodes differ")}</span>}
      {row.byAddress && row.upgrade === null && <FromAddress />}
      {row.isSystem && <span className="tag">system</span>}
      {row.isVariant && <span className="tag">build</span>}
      {row.isDevelopment && <span className="tag">pre-release</span>}
    </>
  );
}

/** Why there is no update. */
export function FromAddress(): ReactNode {
  return (
    <Tip text={FROM_ADDRESS}>
      <span className="tag" tabIndex={0}>
        from an address
      </span>
    </Tip>
  );
}

/** `v1.2.3`; the digest, which tells two builds of it apart, shortened. */
export function Version({ version, digest }: { version: string; digest: string }): ReactNode {
  return (
    <>
      <bdi>{versionText(version) || "–"}</bdi>
      {digest !== "" && (
        <Tip text={digest}>
          <code className="muted" tabIndex={0}>
            {" "}
            {short(digest)}
          </code>
        </Tip>
      )}
    </>
  );
}

/** The operations on one backend that are under way or have failed. */
export function workOn(operations: Iterable<Operation>, name: string): Operation[] {
  return [...operations].filter((operation) => onBackend(operation, name) && (isActive(operation) || needsAttention(operation)));
}

/** The work that goes on, and what failed, each in a word that leads to more. */
export function WorkPills({ operations, name }: { operations: readonly Operation[]; name: string }): ReactNode {
  const active = operations.filter(isActive);
  const [first] = active;
  const { nodes } = pendingOf(active, name);
  return (
    <>
      {nodes > 0 && <span className="pill">pending on {count(nodes, "node")}</span>}
      {first !== undefined && (
        <Link className="pill info" to="/app/activity?show=backends">
          {active.length === 1 ? `${phrase(first, stateOf(first))} ${place(first, [first.nodeName ?? ""])}` : `${active.length} operations in progress`}
        </Link>
      )}
      {active.length > 0 && <SilenceNotice of={progressTimes(active)} />}
      {operations.filter(needsAttention).map((operation) => (
        <Link key={operation.jobID} className="pill bad" to={backendAddress(name)}>
          {failureOf(operation)}
        </Link>
      ))}
    </>
  );
}

/** "Could not install backend on fine" */
function failureOf(operation: Operation): string {
  return `${phrase(operation, "failed")} ${place(operation, operation.nodeName === undefined ? [] : [operation.nodeName])}`;
}

/** A failure with its reason and what can be done about it. */
export function Failure({ operation, name }: { operation: Operation; name: string }): ReactNode {
  return (
    <div className="stack">
      <strong>{failureOf(operation)}</strong>
      <Reason error={operation.error} name={name} />
      <FailureActions operations={[operation]} small />
    </div>
  );
}
