// The columns of the models.
import { useEffect, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { bytes, count } from "../lib/format";
import { Dash } from "../ui/empty";
import type { Column } from "../ui/rows";
import { Ago } from "../ui/time";
import { useFit } from "./fits";
import { contextWords } from "./memory";
import { backendOf, modelAddress, replicaCount, STATES, stateOf, type ModelRow, type ModelState } from "./rows";

const TONES: Readonly<Record<ModelState, string>> = { unusable: "bad", failed: "bad", loading: "info", loaded: "good", unloading: "warn", disabled: "", idle: "" };
const WORDS: Partial<Record<ModelState, string>> = { idle: "not running", unusable: "cannot be used" };

export function StatePill({ row }: { row: ModelRow }): ReactNode {
  const state = stateOf(row);
  return <span className={`pill ${TONES[state]}`}>{WORDS[state] ?? state}</span>;
}

function Name({ row }: { row: ModelRow }): ReactNode {
  return (
    <>
      <Link className="name" to={modelAddress(row.name)} title={row.name}>
        <bdi>{row.name}</bdi>
      </Link>
      {row.definition === undefined && <span className="tag">not defined on this server</span>}
      {row.definition?.state === "shadowed" && <span className="tag">shadowed by a file</span>}
    </>
  );
}

/** "1 / 2": replicas that serve, and those that the rule wants. */
export function replicaText(row: Pick<ModelRow, "places" | "rule">): string {
  const { running, wanted } = replicaCount(row);
  return wanted === null ? String(running) : `${running} / ${wanted}`;
}

export function rateText(rate: number): string {
  return `${rate.toLocaleString("en", { maximumSignificantDigits: 3 })}/s`;
}

const FITS_AFTER_MS = 500;
const FITS_FRESH_MS = 300_000;

/** Read for a row that stays in sight: not for each of thousands that are scrolled past. */
function Fits({ model }: { model: string }): ReactNode {
  const [stays, setStays] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setStays(true), FITS_AFTER_MS);
    return () => clearTimeout(timer);
  }, []);
  const { data, isError } = useFit(model, { enabled: stays, staleTime: FITS_FRESH_MS });
  if (isError || data?.defined === false) return <Dash why="not known" />;
  if (data === undefined) return <span className="muted">…</span>;
  return (
    <bdi className="name" title={data.says}>
      {data.fitting > 0 ? count(data.fitting, "node") : data.possible > 0 ? "tight" : "no node now"}
    </bdi>
  );
}

export const COLUMNS: readonly Column<ModelRow>[] = [
  { key: "name", title: "Name", width: [11, 1.6], value: ({ name }) => name, cell: (row) => <Name row={row} /> },
  { key: "state", title: "State", by: "needs attention first", width: [8, 0.4], value: (row) => STATES.indexOf(stateOf(row)), cell: (row) => <StatePill row={row} /> },
  { key: "replicas", title: "Replicas", width: [5.5, 0.2], largestFirst: true, value: (row) => replicaCount(row).running, cell: replicaText },
  {
    key: "backend", title: "Backend", width: [6.5, 0.7], leaveOut: 2, value: (row) => backendOf(row) || null,
    cell: (row) => (backendOf(row) === "" ? <Dash why="backend unknown" /> : <bdi className="name" title={backendOf(row)}>{backendOf(row)}</bdi>),
  },
  {
    key: "size", title: "Size", width: [5, 0.2], largestFirst: true, leaveOut: 3, value: ({ definition }) => definition?.size || null,
    cell: ({ definition }) => (definition?.size ? bytes(definition.size) : <Dash why="size unknown" />),
  },
  {
    key: "context", title: "Context", width: [5, 0.2], largestFirst: true, leaveOut: 5, value: ({ definition }) => definition?.context_size || null,
    cell: ({ definition }) => (definition?.context_size ? contextWords(definition.context_size) : <Dash why="context unknown" />),
  },
  { key: "fits", title: "Fits on", width: [6.5, 0.4], leaveOut: 7, cell: ({ name, definition }) => (definition === undefined || definition.state === "unusable" ? <Dash why="not known" /> : <Fits model={name} />) },
  { key: "rate", title: "Requests", by: "requests a second", width: [5.5, 0.2], largestFirst: true, leaveOut: 4, value: ({ rate }) => rate, cell: ({ rate }) => (rate === null ? <Dash why="no requests" /> : rateText(rate)) },
  {
    key: "changed", title: "Changed", by: "last change", width: [5.5, 0.2], largestFirst: true, leaveOut: 6,
    value: ({ definition }) => (definition === undefined ? null : Date.parse(definition.updated_at)),
    cell: ({ definition }) => (definition === undefined ? <Dash why="not known" /> : <Ago at={definition.updated_at} intervalMs={60_000} />),
  },
];
