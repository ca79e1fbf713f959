// The editor of a definition: a form for what most people change, and the YAML. Both are checked while somebody types,
// and what saving would do is shown before it is done.
import { useState, type ReactNode, type SubmitEvent } from "react";
import { ApiError } from "../api/client";
import { count } from "../lib/format";
import { useDebounced } from "../lib/debounced";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Problem } from "../ui/problem";
import { FieldMessage, TextField } from "../ui/text-field";
import { CodeArea } from "./code-area";
import { saveDefinition, useDefinitionAction, usePreview, useRevisions, type Edit, type Save } from "./definitions";
import { Diff } from "./diff";
import { changesOf, problemsOf, rebased, typedOf, type FormField, type TypedForm } from "./editor-form";
import { LeaveQuestion } from "./leave-question";
import { Memory } from "./memory";
import type { DefinitionDetail, DefinitionForm, DefinitionPreview, TextError } from "./shapes";

const CHECK_AFTER_MS = 400;
const CHECKING = "The changes are being checked";
const FIRST_CORRECT = "Correct the marked fields first";
const NO_ERRORS: readonly TextError[] = [];
const NO_FORM: DefinitionForm = { context_size: null, parallel: null, gpu_layers: null, template: "", options: [], max_tokens: null };

interface EditorProps {
  /** The definition that was taken up for editing. */
  detail: DefinitionDetail;
  /** As it is on the server now. */
  newest: DefinitionDetail;
  /** Goes on from the newest revision with what is typed. */
  onRebase: (newest: DefinitionDetail) => void;
  onClose: () => void;
}

type Mode = "form" | "yaml";

/** What is typed, and what the server says of it. */
function useEdit(detail: DefinitionDetail, newestRevision: number) {
  const [mode, setMode] = useState<Mode>(detail.form === null ? "yaml" : "form");
  const [typed, setTyped] = useState(() => typedOf(detail.form ?? NO_FORM));
  const [text, setText] = useState(detail.text);
  const problems = mode === "form" ? problemsOf(typed) : {};
  const edit = editOf(mode, detail, typed, text);
  const settled = useDebounced(JSON.stringify(Object.keys(problems).length > 0 ? null : edit), CHECK_AFTER_MS);
  const preview = usePreview(detail.name, newestRevision, JSON.parse(settled) as Edit | null);
  const isChecked = settled === JSON.stringify(edit) && !preview.isFetching && !preview.isPlaceholderData;
  return { mode, setMode, typed, setTyped, text, setText, problems, edit, preview, isChecked, isChanged: edit !== null || Object.keys(problems).length > 0 };
}

/** Saving; `isMoved`: only onto a newer revision. */
function useSave({ name, revision }: DefinitionDetail, newestRevision: number) {
  const save = useDefinitionAction((input: Save) => saveDefinition(name, input), (saved) => announce(`Revision ${saved.revision} of ${saved.name} saved.`));
  const isMoved = newestRevision !== revision || (save.error instanceof ApiError && save.error.field === "revision");
  const forgetRefusal = () => {
    if (save.error !== null && !isMoved) save.forget();
  };
  return { save, isMoved, forgetRefusal };
}

export function Editor({ detail, newest, onRebase, onClose }: EditorProps): ReactNode {
  const { mode, setMode, typed, setTyped, text, setText, problems, edit, preview, isChecked, isChanged } = useEdit(detail, newest.revision);
  const [reason, setReason] = useState("");
  const { save, isMoved, forgetRefusal } = useSave(detail, newest.revision);
  const refusal = refusalOf({ edit, problems, isMoved, isChecked, preview: preview.data });
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (refusal === "" && edit !== null && !save.busy) save.run({ edit, revision: detail.revision, reason: reason.trim() }, onClose);
  };
  const choose = (next: Mode) => {
    if (next === "form") setText(detail.text);
    else if (mode === "form" && edit !== null && preview.data !== undefined) setText(preview.data.text);
    setMode(next);
  };
  const rebase = () => {
    save.forget();
    if (mode === "form") {
      setTyped(rebased(detail.form ?? NO_FORM, newest.form ?? NO_FORM, typed));
      setText(newest.text);
    }
    onRebase(newest);
  };
  return (
    <form className="stack" noValidate onSubmit={submit} onChange={forgetRefusal}>
      <LeaveQuestion name={detail.name} enabled={isChanged || reason !== ""} />
      <Shadow shadowed={detail.shadowed || detail.origin === "file"} file={detail.file} />
      <Modes mode={mode} formRefusal={formRefusal(mode, detail, text)} yamlRefusal={textRefusal(mode, { edit, problems, isChecked, preview: preview.data })} onChoose={choose} onDiscard={mode === "yaml" && text !== detail.text ? () => setText(detail.text) : null} />
      {mode === "form" ? (
        <FormFields typed={typed} problems={problems} onChange={(field, value) => setTyped({ ...typed, [field]: value })} />
      ) : (
        <CodeArea label={`YAML of ${detail.name}`} text={text} errors={edit === null ? NO_ERRORS : (preview.data?.errors ?? NO_ERRORS)} onChange={setText} />
      )}
      {isMoved && <Moved detail={detail} newest={newest} action={mode === "form" ? "Apply my changes to revision" : "Replace revision"} onRebase={rebase} />}
      <div className="editor-effect" aria-live="polite">
        {preview.error === null && <Outlook name={detail.name} edit={edit} problems={problems} preview={preview.data} mode={mode} />}
        <Problem error={preview.error} onRetry={() => void preview.refetch()} />
      </div>
      <TextField label="Reason" description="Shown with the revision. Optional." value={reason} onChange={setReason} />
      {!isMoved && <Problem error={save.error} />}
      <div className="row wrap">
        <Button type="submit" kind="primary" busy={save.busy} refusal={refusal}>
          Save
        </Button>
        <Button onClick={onClose}>Cancel</Button>
      </div>
    </form>
  );
}

/** `onDiscard`: null if the YAML is as it was. */
function Modes({ mode, formRefusal, yamlRefusal, onChoose, onDiscard }: { mode: Mode; formRefusal: string; yamlRefusal: string; onChoose: (mode: Mode) => void; onDiscard: (() => void) | null }): ReactNode {
  return (
    <div className="row wrap" role="group" aria-label="Edit as">
      <Button small className="chip" aria-pressed={mode === "form"} refusal={formRefusal} onClick={() => onChoose("form")}>
        Form
      </Button>
      <Button small className="chip" aria-pressed={mode === "yaml"} refusal={yamlRefusal} onClick={() => onChoose("yaml")}>
        YAML
      </Button>
      {onDiscard !== null && (
        <Button small kind="ghost" onClick={onDiscard}>
          Discard changes
        </Button>
      )}
    </div>
  );
}

/** What saving would do, as far as that is known. */
function Outlook({ name, edit, problems, preview, mode }: Omit<Standing, "isMoved" | "isChecked"> & { name: string; mode: Mode }): ReactNode {
  if (Object.keys(problems).length > 0) return <p className="muted">Correct the marked fields.</p>;
  if (edit === null) return <p className="muted">No changes yet.</p>;
  return preview === undefined ? <p className="muted">Checking…</p> : <Effect name={name} preview={preview} mode={mode} />;
}

/** Why the form cannot be used now; "" if it can. */
function formRefusal(mode: Mode, { form, text: stored }: DefinitionDetail, text: string): string {
  if (form === null) return "Correct the YAML first";
  return mode === "yaml" && text !== stored ? "The YAML was edited. Discard its changes to use the form." : "";
}

/** Why the form's changes cannot be taken into the YAML now; "" if they can: its text is the server's. */
function textRefusal(mode: Mode, { edit, problems, isChecked, preview }: Omit<Standing, "isMoved">): string {
  if (mode === "yaml") return "";
  if (Object.keys(problems).length > 0) return FIRST_CORRECT;
  return edit === null || (isChecked && preview !== undefined) ? "" : CHECKING;
}

/** What would be sent; null: nothing is changed. */
function editOf(mode: Mode, detail: DefinitionDetail, typed: TypedForm, text: string): Edit | null {
  if (mode === "yaml") return text === detail.text ? null : { text };
  const changes = changesOf(detail.form ?? NO_FORM, typed);
  return Object.keys(changes).length === 0 ? null : { changes };
}

interface Standing {
  edit: Edit | null;
  problems: object;
  isMoved: boolean;
  isChecked: boolean;
  preview: DefinitionPreview | undefined;
}

/** Why it cannot be saved now; "" if it can. */
function refusalOf({ edit, problems, isMoved, isChecked, preview }: Standing): string {
  if (isMoved) return "Another user saved a revision. Decide above";
  if (Object.keys(problems).length > 0) return FIRST_CORRECT;
  if (edit === null) return "No changes";
  if (!isChecked || preview === undefined) return CHECKING;
  return preview.valid ? "" : "Correct the errors first";
}

const FIELDS: readonly (readonly [field: Exclude<FormField, "template" | "options">, label: string, description: string])[] = [
  ["context_size", "Context, tokens", "Empty: the backend's default."],
  ["parallel", "Parallel slots", "Requests that one replica answers at once. Empty: one."],
  ["gpu_layers", "GPU layers", "A number, or auto for as many as fit."],
  ["max_tokens", "Default max tokens", "For requests without a limit. Empty: no limit."],
];

function FormFields({ typed, problems, onChange }: { typed: TypedForm; problems: Partial<Record<FormField, string>>; onChange: (field: FormField, text: string) => void }): ReactNode {
  return (
    <div className="editor-form">
      {FIELDS.map(([field, label, description]) => (
        <TextField key={field} numeric label={label} description={description} value={typed[field]} problem={problems[field]} onChange={(text) => onChange(field, text)} />
      ))}
      <Lines id="definition-options" label="Options" description="One per line, as name:value." value={typed.options} onChange={(text) => onChange("options", text)} />
      <Lines id="definition-template" label="Chat template" description="Jinja. Empty: the template in the model's file." value={typed.template} onChange={(text) => onChange("template", text)} />
    </div>
  );
}

function Lines({ id, label, description, value, onChange }: { id: string; label: string; description: string; value: string; onChange: (text: string) => void }): ReactNode {
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <textarea id={id} className="input mono" rows={3} spellCheck={false} value={value} aria-describedby={`${id}-said`} onChange={(event) => onChange(event.target.value)} />
      <FieldMessage id={`${id}-said`} problem="" description={description} />
    </div>
  );
}

const NAMED = 10;

/** What saving would do: which replicas are replaced, what fits where, and the change of the text. */
function Effect({ name, preview: { valid, errors, warnings, revision_changes: changes, replicas, fit, diff }, mode }: { name: string; preview: DefinitionPreview; mode: Mode }): ReactNode {
  return (
    <div className="stack">
      {!valid && mode === "form" && (
        <ul className="code-errors">
          {errors.map(({ path, message }) => (
            <li key={`${path} ${message}`}>
              <code>{path}</code> <bdi>{message}</bdi>
            </li>
          ))}
        </ul>
      )}
      {warnings.map((warning) => (
        <p key={warning} className="risk">
          <bdi>{warning}</bdi>
        </p>
      ))}
      {valid && <Replaced changes={changes} replicas={replicas} />}
      {diff !== "" && (
        <details open>
          <summary>Changes</summary>
          <Diff text={diff} />
        </details>
      )}
      {valid && fit !== null && (
        <details>
          <summary>Where the new definition fits</summary>
          <Memory memory={fit.memory} name={name} need={fit.placement.need} />
        </details>
      )}
    </div>
  );
}

/** The replicas that renewal replaces. */
function Replaced({ changes, replicas }: { changes: boolean; replicas: DefinitionPreview["replicas"] }): ReactNode {
  const names = replicas.slice(0, NAMED).map(({ node_name: node, replica_index: index }) => `${node}#${index}`);
  if (!changes) return <p>No replica is replaced, because the load options stay the same.</p>;
  if (replicas.length === 0) return <p>The model has no replicas. The next load uses the new definition.</p>;
  return (
    <p className="anywhere">
      <strong>
        {count(replicas.length, "replica")} {replicas.length === 1 ? "is" : "are"} replaced
      </strong>
      , one after another: <bdi>{names.join(", ")}</bdi>
      {replicas.length > NAMED && ` and ${replicas.length - NAMED} more`}.
    </p>
  );
}

/** Somebody saved meanwhile: their change, and the way on. */
function Moved({ detail, newest, action, onRebase }: { detail: DefinitionDetail; newest: DefinitionDetail; action: string; onRebase: () => void }): ReactNode {
  const { data = [] } = useRevisions(detail.name);
  const others = data.filter(({ number }) => number > detail.revision);
  return (
    <section className="risk stack" aria-label="Change by another user">
      <p>
        <strong>{others[0] === undefined ? "Another user" : <bdi>{others[0].actor}</bdi>} saved revision {newest.revision} while you were editing.</strong> Your input is kept.
      </p>
      {others.map(({ number, diff }) => (
        <Diff key={number} text={diff} />
      ))}
      <div className="row wrap">
        <Button small refusal={newest.revision === detail.revision ? "The new revision is being read" : ""} onClick={onRebase}>
          {action} {newest.revision}
        </Button>
      </div>
    </section>
  );
}

/** A file wins over what is edited here. */
export function Shadow({ shadowed, file }: { shadowed: boolean; file: string }): ReactNode {
  if (!shadowed) return null;
  return (
    <p className="risk anywhere">
      The file <code>{file}</code> in the models folder stays in force. Changes made here are saved and take effect when the file is removed.
    </p>
  );
}
