// The models of the galleries, with search and filters. Choosing one shows its variants on top of the page.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { chatAddress } from "../chat/models";
import { useDebounced } from "../lib/debounced";
import { bytes, count } from "../lib/format";
import { useChange, useLive } from "../live/hooks";
import { isActive, type LiveState } from "../live/store";
import { Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { Select, type Option } from "../ui/select";
import { Checkbox } from "../ui/text-field";
import { modelAddress } from "./rows";
import type { Catalogue as Page, CatalogueModel } from "./shapes";
import { ITEMS, SIZES, useCatalogue, type CatalogueFilter } from "./sources";
import { Work } from "./work";

const ASK_AFTER_MS = 300;

interface CatalogueProps {
  filter: CatalogueFilter;
  onFilter: (filter: CatalogueFilter) => void;
  onChoose: (text: string) => void;
}

export function Catalogue({ filter, onFilter, onChoose }: CatalogueProps): ReactNode {
  const term = useDebounced(filter.term, ASK_AFTER_MS);
  const query = useCatalogue({ ...filter, term });
  const { data } = query;
  // An import that begins or ends, also of somebody else, changes rows.
  useChange(useLive(activeImports), () => void query.refetch());
  // A change of the filter begins at the first page.
  const change = (part: Partial<CatalogueFilter>) => onFilter({ ...filter, page: 1, ...part });
  return (
    <Panel title="Catalogue" aside={data !== undefined && <span className="muted" role="status">{count(data.total, "model")}</span>}>
      <Filters filter={filter} page={data} onChange={change} />
      {query.isPending && <Loading subject="the catalogue" />}
      <Problem error={query.error} onRetry={() => void query.refetch()} />
      {data?.gallery_errors.map(({ name, error }) => (
        <Problem key={name} quiet error={new Error(`Gallery ${name}: ${error}`)} onRetry={() => void query.refetch()} />
      ))}
      {data !== undefined && data.models.length === 0 && (
        <Empty title={data.galleries.length === 0 ? "No model gallery is configured" : "No matching models"}>
          {data.galleries.length === 0 ? <p>Set LOCALAI_GALLERIES to list galleries, or paste a name or an address above.</p> : <Button onClick={() => change({ term: "", task: "", licence: "", gallery: "", size: "", fits: false })}>Show all</Button>}
        </Empty>
      )}
      {data !== undefined && data.models.length > 0 && (
        <>
          <ul className="model-catalogue">
            {data.models.map((model) => (
              <Line key={model.id} model={model} onChoose={onChoose} />
            ))}
          </ul>
          <Pages page={data.page} total={data.total} onPage={(page) => onFilter({ ...filter, page })} />
        </>
      )}
    </Panel>
  );
}

const SIZE_OPTIONS: readonly Option[] = SIZES.map((size) => [size, size === "" ? "Any size" : `Up to ${size} GiB`]);

function Filters({ filter, page, onChange }: { filter: CatalogueFilter; page: Page | undefined; onChange: (part: Partial<CatalogueFilter>) => void }): ReactNode {
  const options = (all: string, values: readonly string[] = [], chosen: string): Option[] => [["", all], ...[...new Set([...values, ...(chosen === "" ? [] : [chosen])])].map((value) => [value, value] as const)];
  return (
    <div className="row wrap">
      <input className="input model-filter" type="search" aria-label="Search the catalogue" placeholder="Name, description or tag" value={filter.term} onChange={(event) => onChange({ term: event.target.value })} />
      <Select label="Task" labelled="hidden" value={filter.task} options={options("All tasks", page?.tasks, filter.task)} onChange={(task) => onChange({ task })} />
      <Select label="Licence" labelled="hidden" value={filter.licence} options={options("All licences", page?.licences, filter.licence)} onChange={(licence) => onChange({ licence })} />
      <Select label="Size" labelled="hidden" value={filter.size} options={SIZE_OPTIONS} onChange={(size) => onChange({ size })} />
      {(page?.galleries.length ?? 0) > 1 && <Select label="Gallery" labelled="hidden" value={filter.gallery} options={options("All galleries", page?.galleries, filter.gallery)} onChange={(gallery) => onChange({ gallery })} />}
      <Checkbox label="Fits on my nodes" on={filter.fits} onChange={(fits) => onChange({ fits })} />
    </div>
  );
}

/** The imports under way, as a text that changes with them. */
function activeImports({ operations }: LiveState): string {
  const ids = [...operations.values()].filter((operation) => operation.kind === "model_import" && isActive(operation)).map(({ jobID }) => jobID);
  return ids.toSorted().join(" ");
}

function Line({ model, onChoose }: { model: CatalogueModel; onChoose: (text: string) => void }): ReactNode {
  const { id, name, gallery, description, licence, task, size, installed, jobID, fits } = model;
  const running = useLive((state) => state.operations.get(jobID));
  return (
    <li>
      <div className="grow">
        <div className="row wrap">
          <strong className="name" title={name}>
            <bdi>{name}</bdi>
          </strong>
          {task !== "" && <span className="tag">{task}</span>}
          {size > 0 && <span>{bytes(size)}</span>}
          {fits !== null && <span className={`pill ${fits ? "good" : "warn"}`}>{fits ? "fits" : "fits on no node now"}</span>}
          <span className="muted name">{[licence, gallery].filter(Boolean).join(" · ")}</span>
        </div>
        <p className="name muted" title={description}>
          <bdi>{description}</bdi>
        </p>
        {running !== undefined && isActive(running) && <Work operation={running} />}
      </div>
      {jobID !== "" && running?.status !== "completed" ? (
        <Link className="pill info" to={`/app/operations/${jobID}`} aria-label={`${name}: being added`}>
          being added
        </Link>
      ) : installed || running !== undefined ? (
        <Links name={running?.fullName ?? name} isForChat={task === "chat"} />
      ) : (
        <Button small aria-label={`Choose ${name}`} onClick={() => onChoose(id)}>
          Choose
        </Button>
      )}
    </li>
  );
}

/** The ways to a model that is here. */
function Links({ name, isForChat }: { name: string; isForChat: boolean }): ReactNode {
  return (
    <div className="row">
      {isForChat && (
        <Link to={chatAddress(name)} aria-label={`Chat with ${name}`}>
          Chat
        </Link>
      )}
      <Link to={modelAddress(name)} aria-label={`Open ${name}`}>
        Open
      </Link>
    </div>
  );
}

function Pages({ page, total, onPage }: { page: number; total: number; onPage: (page: number) => void }): ReactNode {
  const last = Math.max(1, Math.ceil(total / ITEMS));
  if (last === 1) return null;
  return (
    <div className="row wrap">
      <Button small refusal={page <= 1 ? "This is the first page" : ""} onClick={() => onPage(page - 1)}>
        Previous
      </Button>
      <span>
        Page {page} of {last}
      </span>
      <Button small refusal={page >= last ? "This is the last page" : ""} onClick={() => onPage(page + 1)}>
        Next
      </Button>
    </div>
  );
}
