// The models as a table: what is defined, what runs and what failed. A row opens the model's page.
import { memo, useCallback, useDeferredValue, useMemo, useRef, useState, type CSSProperties, type ReactNode } from "react";
import { Link, useNavigate } from "react-router";
import { count } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { useRules } from "../scheduling/rules";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import { Menu } from "../ui/menu";
import { Problem } from "../ui/problem";
import { sorted } from "../ui/rows";
import { DataGrid, useMeasured } from "../ui/table";
import { PageHead } from "../ui/title";
import { ActionDialog, menuOf, type ModelAction } from "./actions";
import { COLUMNS } from "./columns";
import { useDefinitionList, type Definitions } from "./definitions";
import { addressOf, filterRows, modelAddress, parseFilter, SHOWN, type ModelFilter, type ModelRow, type Shown } from "./rows";
import { useModelRows } from "./use-rows";
import "../nodes/list/list.css";
import "../nodes/shared/shared.css";
import "./models.css";

const UNUSABLE_FIRST = 5;
const NONE: Definitions = { rows: [], unusable: [] };

export function ModelsPage(): ReactNode {
  const { data = NONE, error, isPending, refetch } = useDefinitionList();
  const rules = useRules();
  const { rows, isKnown } = useModelRows();
  const isReady = isKnown && !isPending;
  return (
    <div className="models-page">
      <PageHead title="Models">
        <Link className="button primary" to="/app/models/add">
          Add a model
        </Link>
      </PageHead>
      {!isReady && <Loading subject="models" />}
      <Problem error={error} onRetry={() => void refetch()} />
      <Problem error={rules.error} onRetry={() => void rules.refetch()} />
      <Unusable definitions={data} onRefresh={() => void refetch()} />
      {isReady && rows.length === 0 && error === null && <NoModels />}
      {isReady && rows.length > 0 && <Models rows={rows} />}
    </div>
  );
}

/** Definitions that serve nothing, with the place in the text: they would be missing from the list without a word. */
function Unusable({ definitions: { unusable }, onRefresh }: { definitions: Definitions; onRefresh: () => void }): ReactNode {
  const [isExpanded, setIsExpanded] = useState(false);
  if (unusable.length === 0) return null;
  const shown = isExpanded ? unusable : unusable.slice(0, UNUSABLE_FIRST);
  return (
    <section className="problem" aria-label="Definitions that cannot be used">
      <div className="grow">
        <strong>{count(unusable.length, "model definition")} cannot be used.</strong>
        <ul className="anywhere">
          {shown.map(({ file, name, line, error }) => (
            <li key={`${file} ${name}`}>
              <code>{file || name}</code> {line > 0 && <>line {line}: </>}
              <bdi>{error}</bdi>
            </li>
          ))}
        </ul>
      </div>
      {shown.length < unusable.length && (
        <Button small onClick={() => setIsExpanded(true)}>
          Show {unusable.length - shown.length} more
        </Button>
      )}
      <Button small onClick={onRefresh}>
        Refresh
      </Button>
    </section>
  );
}

function NoModels(): ReactNode {
  return (
    <Empty title="No models">
      <p>Paste a name or an address, or choose a model from a gallery.</p>
      <Link className="button primary" to="/app/models/add">
        Add a model
      </Link>
    </Empty>
  );
}

const SHOWN_WORDS: Readonly<Record<Shown, string>> = { all: "All", running: "Running", idle: "Not running", failed: "Failed" };
const ALL: Pick<ModelFilter, "term" | "shown"> = { term: "", shown: "all" };

const readFilter = (query: URLSearchParams) => parseFilter(query, COLUMNS);
const nameOf = ({ name }: ModelRow) => name;

function Models({ rows }: { rows: readonly ModelRow[] }): ReactNode {
  const [filter, setFilter] = useInAddress(readFilter, addressOf);
  const [action, setAction] = useState<ModelAction | null>(null);
  const settled = useDeferredValue(filter);
  const matches = useMemo(() => sorted(filterRows(rows, settled), COLUMNS, settled.sort, nameOf, nameOf), [rows, settled]);
  const tools = useRef<HTMLDivElement>(null);
  const covered = useMeasured(tools, (element) => element.offsetHeight);
  return (
    <section className="roster" aria-label="All models" tabIndex={-1} data-content="" style={{ "--tools": `${covered}px` } as CSSProperties}>
      <div ref={tools} className="roster-tools">
        <Filter filter={filter} resultText={`${matches.length} of ${count(rows.length, "model")} shown`} onChange={setFilter} />
      </div>
      {matches.length === 0 ? (
        <Empty title="No matching models">
          <Button onClick={() => setFilter({ ...filter, ...ALL })}>Show all</Button>
        </Empty>
      ) : (
        <Listing matches={matches} filter={settled} covered={covered} onFilter={setFilter} onAct={setAction} />
      )}
      {action !== null && <ActionDialog action={action} onClose={() => setAction(null)} />}
    </section>
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
            {SHOWN_WORDS[option]}
          </Button>
        ))}
      </div>
      <span className="muted" role="status">
        {resultText}
      </span>
    </div>
  );
}

interface ListingProps {
  matches: readonly ModelRow[];
  filter: ModelFilter;
  covered: number;
  onFilter: (filter: ModelFilter) => void;
  onAct: (action: ModelAction) => void;
}

/** The bar on top of every page. */
const TOP_BAR = 48;

const Listing = memo(function Listing({ matches, filter, covered, onFilter, onAct }: ListingProps): ReactNode {
  const navigate = useNavigate();
  const open = useCallback((row: ModelRow) => void navigate(modelAddress(row.name)), [navigate]);
  const menu = useCallback((row: ModelRow) => <Menu name={`Actions for ${row.name}`} items={menuOf(row, onAct, (address) => void navigate(address))} />, [onAct, navigate]);
  return (
    <DataGrid
      name="Models"
      noun="model"
      rows={matches}
      rowId={nameOf}
      rowName={nameOf}
      columns={COLUMNS}
      sort={filter.sort}
      onSort={(sort) => onFilter({ ...filter, sort })}
      dense
      covered={covered + TOP_BAR}
      onOpen={open}
      menu={menu}
    />
  );
});
