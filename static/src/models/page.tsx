// The page of models: every definition with its replicas by node, loads under way with their progress, and failures
// with their reason. All but definitions, rules and reasons of placement comes from the feed.
import { useDeferredValue, useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { isLoaded, useThrottledNodes } from "../backends/throttled-nodes";
import { count } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { ACTION, IN_FLIGHT, LOGS, placeId, STATE } from "../nodes/detail/unload";
import { FailureActions, Reason } from "../operations/failure";
import { figures, NextCheck, SilenceNotice, WorkGlyph } from "../operations/lines";
import { pageOf, phaseOf, phrase, placeOf, sendingOf, stateOf } from "../operations/words";
import { demand, useRules, type Rule } from "../scheduling/rules";
import { ProgressBar } from "../ui/bars";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import { Actions } from "./actions";
import { useBrokenDefinitions, useDefinitions } from "./data";
import { addressOf, backendOf, modelRows, replicaWords, SHOWN, parseFilter, filterRows, type ModelRow, type Place, type Shown, type ModelFilter } from "./rows";
import { Why } from "./explanation";
import { WhereItFits } from "./memory";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "../operations/operations.css";
import "./models.css";

const DRAWN = 40;
/** A model may run on hundreds of nodes. */
const REPLICAS_FIRST = 10;
const BROKEN_FIRST = 5;

export function ModelsPage(): ReactNode {
  const definitions = useDefinitions();
  const rules = useRules();
  const nodes = useThrottledNodes();
  const operations = useLive((state) => state.operations);
  const rows = useMemo(() => modelRows(definitions.data ?? [], nodes.values(), operations.values()), [definitions.data, nodes, operations]);
  const isReady = isLoaded(nodes) && !definitions.isPending;
  return (
    <div className="models">
      <PageHead title="Models" />
      {!isReady && <Loading subject="models" />}
      <Problem error={definitions.error} onRetry={() => void definitions.refetch()} />
      <Problem error={rules.error} onRetry={() => void rules.refetch()} />
      <BrokenDefinitions />
      {isReady && rows.length === 0 && definitions.error === null && <NoModels />}
      {isReady && rows.length > 0 && <Models rows={rows} rules={rules.data} />}
    </div>
  );
}

/** Files that define no model, with their reason: they would be missing from the list without a word. */
function BrokenDefinitions(): ReactNode {
  const { data = [], refetch } = useBrokenDefinitions();
  const [isExpanded, setIsExpanded] = useState(false);
  if (data.length === 0) return null;
  const shown = isExpanded ? data : data.slice(0, BROKEN_FIRST);
  return (
    <section className="problem" aria-label="Definitions that cannot be used">
      <div className="grow">
        <strong>{count(data.length, "model definition")} cannot be used.</strong>
        <ul className="anywhere">
          {shown.map(({ file, error }) => (
            <li key={file}>
              <code>{file}</code> {error}
            </li>
          ))}
        </ul>
      </div>
      {shown.length < data.length && (
        <Button small onClick={() => setIsExpanded(true)}>
          Show {data.length - shown.length} more
        </Button>
      )}
      <Button small onClick={() => void refetch()}>
        Refresh
      </Button>
    </section>
  );
}

function NoModels(): ReactNode {
  return (
    <Empty title="No models">
      <p>Define a model with a YAML file in the models folder (LOCALAI_MODELS_PATH). It appears here as soon as the file exists.</p>
    </Empty>
  );
}

const WORDS: Readonly<Record<Shown, string>> = { all: "All", running: "Running", idle: "Not running" };

function Models({ rows, rules }: { rows: readonly ModelRow[]; rules: readonly Rule[] | undefined }): ReactNode {
  const [filter, setFilter] = useInAddress(parseFilter, addressOf);
  const [limit, setLimit] = useState(DRAWN);
  const settled = useDeferredValue(filter);
  const matches = useMemo(() => filterRows(rows, settled), [rows, settled]);
  const ruled = useMemo(() => (rules === undefined ? null : new Map(rules.map((rule) => [rule.model_name, rule]))), [rules]);
  return (
    <>
      <Filter filter={filter} resultText={`${matches.length} of ${count(rows.length, "model")} shown`} onChange={setFilter} />
      {matches.length === 0 && (
        <Empty title="No matching models">
          <Button onClick={() => setFilter({ term: "", shown: "all" })}>Show all</Button>
        </Empty>
      )}
      {matches.slice(0, limit).map((row) => (
        <Model key={row.name} row={row} rules={ruled} />
      ))}
      {matches.length > limit && (
        <div>
          <Button onClick={() => setLimit(limit + DRAWN)}>Show more ({matches.length - limit})</Button>
        </div>
      )}
    </>
  );
}

function Filter({ filter, resultText, onChange }: { filter: ModelFilter; resultText: string; onChange: (filter: ModelFilter) => void }): ReactNode {
  return (
    <div className="row wrap">
      <input
        className="input model-filter"
        type="search"
        aria-label="Filter models"
        placeholder="Name or backend"
        value={filter.term}
        onChange={(event) => onChange({ ...filter, term: event.target.value })}
      />
      <div className="row wrap" role="group" aria-label="Show">
        {SHOWN.map((option) => (
          <Button key={option} small className="chip" aria-pressed={filter.shown === option} onClick={() => onChange({ ...filter, shown: option })}>
            {WORDS[option]}
          </Button>
        ))}
      </div>
      <span className="muted" role="status">
        {resultText}
      </span>
    </div>
  );
}

function Model({ row, rules }: { row: ModelRow; rules: ReadonlyMap<string, Rule> | null }): ReactNode {
  const rule = rules?.get(row.name);
  const backend = backendOf(row);
  const replicas = replicaWords(row);
  return (
    <section className="nd-panel" aria-label={row.name}>
      <header>
        <h2 className="anywhere">
          <bdi>{row.name}</bdi>
        </h2>
        <Actions row={row} ruled={rules === null ? null : [...rules.keys()]} />
      </header>
      <div className="row wrap model-facts">
        <span className={`pill ${replicas.tone}`}>{replicas.words}</span>
        {backend !== "" && (
          <span>
            Backend <bdi>{backend}</bdi>
          </span>
        )}
        {row.definition === undefined && <span className="tag">not defined on this server</span>}
        {rule !== undefined && (
          <Link to={`/app/scheduling?q=${encodeURIComponent(row.name)}`} aria-label={`Rule: ${demand(rule)}, of ${row.name}`}>
            Rule: {demand(rule)}
          </Link>
        )}
      </div>
      {row.active.map((operation) => (
        <Work key={operation.jobID} operation={operation} />
      ))}
      {row.failed.map((operation) => (
        <Failure key={operation.jobID} operation={operation} />
      ))}
      {row.places.length > 0 && <Table name={`Replicas of ${row.name}`} columns={COLUMNS} rows={row.places} rowId={placeId} rowName={({ node }) => node.name} first={REPLICAS_FIRST} />}
      {row.definition !== undefined && <WhereItFits model={row.name} />}
      <Why row={row} />
    </section>
  );
}

/** A load or unload under way: what it is at, and how far. */
function Work({ operation }: { operation: Operation }): ReactNode {
  const state = stateOf(operation);
  const title = `${phrase(operation, state)} ${operation.name}`;
  return (
    <div className="model-work">
      <div className="row wrap">
        <WorkGlyph state={state} />
        <Link to={pageOf(operation)}>
          {phrase(operation, state)} {placeOf(operation)}
        </Link>
        <span className="muted">
          {sendingOf(operation) || `${phaseOf(operation)} ${figures(operation.currentBytes ?? 0, operation.totalBytes ?? 0, undefined)}`} <NextCheck operation={operation} /> <SilenceNotice of={operation} />
        </span>
      </div>
      <div className="row">
        <div className="grow">
          <ProgressBar name={title} value={operation.progress} />
        </div>
        <span className="model-percent">{operation.progress}%</span>
      </div>
    </div>
  );
}

function Failure({ operation }: { operation: Operation }): ReactNode {
  return (
    <div className="model-work">
      <div className="row wrap">
        <WorkGlyph state="failed" />
        <Link className="grow" to={pageOf(operation)}>
          {phrase(operation, "failed")} {placeOf(operation)}
        </Link>
        <FailureActions operations={[operation]} small />
      </div>
      <Reason error={operation.error} name={operation.name} />
    </div>
  );
}

const COLUMNS: readonly Column<Place>[] = [
  {
    key: "node",
    title: "Node",
    value: ({ node }) => node.name,
    cell: ({ node }) => (
      <Link to={`/app/nodes/${node.id}`}>
        <bdi>{node.name}</bdi>
      </Link>
    ),
  },
  { key: "replica", title: "Replica", numeric: true, value: ({ model }) => model.replica_index, cell: ({ model }) => model.replica_index },
  STATE,
  IN_FLIGHT,
  { key: "since", title: "Since", value: ({ model }) => model.created_at, cell: ({ model }) => <Ago at={model.created_at} /> },
  LOGS,
  ACTION,
];
