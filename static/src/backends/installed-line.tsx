// One installed backend: what is there, where, what can be done about it, what goes on and what failed.
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { count } from "../lib/format";
import type { LiveNode, Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { onBackend } from "../nodes/detail/words";
import { FailureActions, Reason } from "../operations/failure";
import { phrase, place, stateOf } from "../operations/words";
import { Button } from "../ui/button";
import { StatusPill } from "../ui/status";
import { Ago } from "../ui/time";
import { Tip } from "../ui/tip";
import type { Verb } from "./installed-calls";
import type { Change } from "./installed-dialog";
import { outdated, pendingOf, short, target, type Place, type Row } from "./installed-model";

const FROM_ADDRESS = "Installed from an address: install it from there again";

interface LineProps {
  row: Row;
  open: boolean;
  operations: readonly Operation[];
  onToggle: () => void;
  onChange: (change: Change) => void;
}

export function InstalledLine({ row, open, operations, onToggle, onChange }: LineProps): ReactNode {
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const mine = operations.filter((operation) => onBackend(operation, row.name));
  const active = mine.filter(isActive);
  const failed = mine.filter(needsAttention);
  const chosen = row.places.filter(({ node }) => selected.has(node.id)).map(({ node }) => node);
  const openChange = (verb: Verb, usual: readonly LiveNode[]) => onChange({ verb, backends: [{ name: row.name, nodes: chosen.length > 0 ? chosen : usual }] });
  const placeNodes = row.places.map(({ node }) => node);
  const toggle = (id: string, on: boolean) => {
    const next = new Set(selected);
    if (on) next.add(id);
    else next.delete(id);
    setSelected(next);
  };
  return (
    <li className="catalogue-line installed-line">
      <div className="catalogue-text">
        <Facts row={row} />
      </div>
      <div className="catalogue-state">
        <PendingChip operations={active} name={row.name} />
        <Running operations={active} />
        <Button small kind="ghost" aria-expanded={open} aria-label={`on ${count(row.places.length, "node")}: ${row.name}`} onClick={onToggle}>
          on {count(row.places.length, "node")}
        </Button>
      </div>
      {row.isSystem ? (
        <span className="tag">Protected</span>
      ) : (
        <div className="row wrap">
          {row.upgrade !== null && (
            <Button small kind="primary" aria-label={`Upgrade ${row.name}…`} onClick={() => openChange("upgrade", outdated(row))}>
              Upgrade…
            </Button>
          )}
          <Button small aria-label={`Reinstall ${row.name}…`} refusal={row.byAddress ? FROM_ADDRESS : ""} onClick={() => openChange("reinstall", placeNodes)}>
            Reinstall…
          </Button>
          <Button small aria-label={`Delete ${row.name}…`} onClick={() => openChange("delete", placeNodes)}>
            Delete…
          </Button>
        </div>
      )}
      {open && <Places row={row} selected={selected} onSelect={toggle} />}
      {failed.map((operation) => (
        <div key={operation.jobID} className="stack installed-wide">
          <strong>
            {phrase(operation, "failed")} {place(operation, operation.nodeName === undefined ? [] : [operation.nodeName])}
          </strong>
          <Reason error={operation.error} name={row.name} />
          <FailureActions operations={[operation]} small />
        </div>
      ))}
    </li>
  );
}

function Facts({ row }: { row: Row }): ReactNode {
  return (
    <>
      <div className="row wrap">
        <strong className="name">{row.name}</strong>
        {row.upgrade !== null && <span className="pill info">update{target(row.upgrade) === "" ? " available" : ` to ${target(row.upgrade)}`}</span>}
        {row.drifted > 0 && (
          <span className="pill warn">{count(row.drifted, "node differs", "nodes differ")}</span>
        )}
        {row.isSystem && <span className="tag">system</span>}
        {row.isVariant && <span className="tag">build</span>}
        {row.isDevelopment && <span className="tag">pre-release</span>}
      </div>
      <p className="muted">
        <Version version={row.version} digest={row.digest} />
        {row.source !== "" && (
          <>
            {" from "}
            <bdi className="installed-source">{row.source}</bdi>
          </>
        )}
      </p>
    </>
  );
}

function Version({ version, digest }: { version: string; digest: string }): ReactNode {
  return (
    <>
      <bdi>{version === "" ? "no version" : `v${version.replace(/^v/, "")}`}</bdi>
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

function PendingChip({ operations, name }: { operations: readonly Operation[]; name: string }): ReactNode {
  const { nodes } = pendingOf(operations, name);
  return nodes === 0 ? null : <span className="pill">pending on {count(nodes, "node")}</span>;
}

/** The running work by kind; it links to its page. */
function Running({ operations }: { operations: readonly Operation[] }): ReactNode {
  const [first] = operations;
  if (first === undefined) return null;
  return (
    <Link className="pill info" to="/app/activity?show=backends">
      {operations.length === 1 ? `${phrase(first, stateOf(first))} ${place(first, [first.nodeName ?? ""])}` : `${operations.length} operations in progress`}
    </Link>
  );
}

interface PlacesProps {
  row: Row;
  selected: ReadonlySet<string>;
  onSelect: (id: string, on: boolean) => void;
}

/** The nodes, each to be chosen for an action. */
function Places({ row, selected, onSelect }: PlacesProps): ReactNode {
  return (
    <div className="installed-wide stack">
      {!row.isSystem && (
        <p className="muted">{selected.size === 0 ? "Select nodes to change only those." : `Actions apply to ${count(selected.size, "selected node")}.`}</p>
      )}
      <ul className="installed-places" aria-label={`Nodes with ${row.name}`}>
        {row.places.map((item) => (
          <li key={item.node.id} className="row wrap">
            {!row.isSystem && (
              <input
                type="checkbox"
                aria-label={`Select ${item.node.name} for ${row.name}`}
                checked={selected.has(item.node.id)}
                onChange={(event) => onSelect(item.node.id, event.target.checked)}
              />
            )}
            <Link className="name" to={`/app/nodes/${item.node.id}`}>
              <bdi>{item.node.name}</bdi>
            </Link>
            <StatusPill status={item.node.status} />
            <PlaceFacts place={item} />
          </li>
        ))}
      </ul>
    </div>
  );
}

function PlaceFacts({ place: shown }: { place: Place }): ReactNode {
  return (
    <>
      <span>
        <Version version={shown.version} digest={shown.digest} />
      </span>
      {shown.differs && <span className="pill warn">differs</span>}
      {shown.installedAt !== "" && (
        <span className="muted">
          installed <Ago at={shown.installedAt} />
        </span>
      )}
    </>
  );
}
