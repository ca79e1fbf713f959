// Adding a model: paste anything, choose a variant, and watch the download until it can be talked to. Below lies the
// catalogue of the galleries.
import { useRef, useState, type ReactNode, type RefObject } from "react";
import { Link } from "react-router";
import { ApiError } from "../api/client";
import { chatAddress } from "../chat/models";
import { useDebounced } from "../lib/debounced";
import { useInAddress } from "../lib/in-address";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { Panel } from "../nodes/detail/panel";
import { useOperation } from "../operations/operation-query";
import { Button } from "../ui/button";
import { Loading } from "../ui/empty";
import { Icon } from "../ui/icons";
import { Problem } from "../ui/problem";
import { PageHead } from "../ui/title";
import { Catalogue } from "./catalogue";
import { modelAddress } from "./rows";
import { Candidates, SourceView, type Chosen } from "./source";
import { filterAddress, filterOf, importModel, isShareable, useSource, type CatalogueFilter } from "./sources";
import { useDefinitionAction, useDefinitionChanges } from "./definitions";
import { Failure, Work } from "./work";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "../operations/operations.css";
import "./models.css";

/** Longest text that is sent to be looked at. */
const LONGEST = 100_000;
const ASK_AFTER_MS = 600;

interface View {
  text: string;
  catalogue: CatalogueFilter;
}

const readView = (query: URLSearchParams): View => ({ text: query.get("from") ?? "", catalogue: filterOf(query) });
/** An address is stored in the browser's history and in logs: what may have a secret stays out. */
const writeView = ({ text, catalogue }: View): URLSearchParams => {
  const query = filterAddress(catalogue);
  if (isShareable(text)) query.set("from", text);
  return query;
};

export function AddModelPage(): ReactNode {
  const [view, setView] = useInAddress(readView, writeView);
  const [text, setText] = useState(view.text);
  const [started, setStarted] = useState<StartedImport | null>(null);
  useDefinitionChanges();
  const field = useRef<HTMLTextAreaElement>(null);
  const type = (typed: string) => {
    setText(typed);
    setView((previous) => ({ ...previous, text: typed }));
    setStarted(null);
  };
  const choose = (chosen: string) => {
    type(chosen);
    field.current?.focus();
  };
  return (
    <div className="models-page">
      <PageHead title="Add a model" note={<Link to="/app/models">Models</Link>} />
      <Field field={field} text={text} onChange={type} />
      {started === null ? <Found text={text} onChoose={choose} onStarted={setStarted} /> : <Progress started={started} onAnother={() => choose("")} />}
      <Catalogue filter={view.catalogue} onFilter={(catalogue) => setView((previous) => ({ ...previous, catalogue }))} onChoose={choose} />
    </div>
  );
}

const EXAMPLES = "hf.co/owner/repo · ollama run name · https://… · s3://… · a name · YAML";

function Field({ field, text, onChange }: { field: RefObject<HTMLTextAreaElement | null>; text: string; onChange: (text: string) => void }): ReactNode {
  return (
    <div className="field">
      <label htmlFor="add-model">Name, address or definition</label>
      <textarea
        ref={field}
        id="add-model"
        className="input add-field"
        rows={Math.min(Math.max(text.split("\n").length, 1), 16)}
        maxLength={LONGEST}
        spellCheck={false}
        autoCapitalize="none"
        autoComplete="off"
        aria-describedby="add-model-said"
        value={text}
        onChange={(event) => onChange(event.target.value)}
      />
      <p id="add-model-said" className="field-hint">
        {EXAMPLES}
      </p>
    </div>
  );
}

interface StartedImport {
  jobID: string;
  model: string;
}

interface FoundProps {
  text: string;
  onChoose: (text: string) => void;
  onStarted: (started: StartedImport) => void;
}

/** The error as a sentence about the pasted text: the server begins with the name of its field. */
function asSentence(error: Error | null): Error | null {
  if (!(error instanceof ApiError) || !error.message.startsWith("text: ")) return error;
  return new ApiError(error.message.replace("text:", "This text"), error.status, error.field, error.code, error.retryAfter, error.requestId);
}

/** What the text is; it is asked once the typing rests. */
function Found({ text, onChoose, onStarted }: FoundProps): ReactNode {
  const wanted = text.trim();
  const settled = useDebounced(wanted, ASK_AFTER_MS);
  const query = useSource(settled === wanted ? wanted : "");
  const start = useDefinitionAction(importModel, ({ jobID, model }) => onStarted({ jobID, model }));
  if (wanted === "") return null;
  if (settled !== wanted || query.isPending) return <Loading subject="the source" />;
  if (query.data === undefined) return <Problem error={asSentence(query.error)} onRetry={() => void query.refetch()} />;
  const add = ({ variant, name, load }: Chosen) => start.run({ text: wanted, variant, name, load });
  return (
    <>
      {query.data.kind === "search" ? <Candidates source={query.data} onChoose={onChoose} /> : <SourceView key={wanted} source={query.data} busy={start.busy} onAdd={add} />}
      <Problem error={start.error} onDismiss={start.forget} />
    </>
  );
}

/** How far the import is, or how it has ended. */
function Import({ operation }: { operation: Operation }): ReactNode {
  if (isActive(operation)) return <Work operation={operation} />;
  if (operation.status === "failed") return <Failure operation={operation} />;
  if (operation.status === "cancelled") return <p>Cancelled. Downloaded data is kept for the next attempt.</p>;
  return (
    <p className="row" role="status">
      <Icon name="done" /> Added.
    </p>
  );
}

/** The import and the load that follows it, to the link to the chat. */
function Progress({ started: { jobID, model }, onAnother }: { started: StartedImport; onAnother: () => void }): ReactNode {
  const { operation, query } = useOperation(jobID);
  const load = useLive(({ operations }) => {
    for (const other of operations.values()) if (other.kind === "model_load" && other.fullName === model && (isActive(other) || needsAttention(other))) return other;
    return undefined;
  });
  const done = operation?.status === "completed";
  return (
    <Panel title="Your model">
      <p className="anywhere">
        <Link to={modelAddress(model)}>
          <bdi>{model}</bdi>
        </Link>
      </p>
      <Problem error={operation === undefined ? query.error : null} onRetry={() => void query.refetch()} />
      {operation === undefined ? query.error === null && <Loading subject="the operation" /> : <Import operation={operation} />}
      {done && load !== undefined && (isActive(load) ? <Work operation={load} /> : <Failure operation={load} />)}
      <div className="row wrap">
        {done && (
          <Link className="button primary" to={chatAddress(model)}>
            Chat
          </Link>
        )}
        <Button onClick={onAnother}>Add another model</Button>
      </div>
    </Panel>
  );
}

