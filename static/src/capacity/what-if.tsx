// The what-if page: where replicas would go on the fleet, also with more nodes, and why. It asks
// the server, which decides as it would for a load and changes nothing.
import { useId, useRef, useState, type ReactNode, type RefObject, type SubmitEvent } from "react";
import { count } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { useDefinitions } from "../models/data";
import { Details } from "../models/decision";
import { slotOf } from "../models/explanation-query";
import { Memory } from "../models/memory";
import { Button } from "../ui/button";
import { Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { FieldMessage, TextField } from "../ui/text-field";
import { PageHead } from "../ui/title";
import { CapacityTabs } from "./tabs";
import { formAddress, BLANK, usePlan, parseForm, validateForm, type Plan, type PlanForm, type PlanQuestion } from "./plan-form";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "../models/models.css";
import "./capacity.css";

const isBlank = (form: PlanForm) => formAddress(form).toString() === "";

export function WhatIfPage(): ReactNode {
  const [form, setForm] = useInAddress(parseForm, formAddress);
  // An address with a question in it is one that somebody was sent.
  const [submitted, setSubmitted] = useState<PlanQuestion | null>(() => (isBlank(form) || Object.keys(validateForm(form, null)).length > 0 ? null : { form, file: null }));
  const [chosenFile, setFile] = useState<File | null>(null);
  const file = form.model.trim() === "" ? chosenFile : null;
  const plan = usePlan(submitted);
  const isCurrent = submitted?.form === form && submitted.file === file;
  return (
    <div className="cap">
      <PageHead title="What if" note="Plan replicas on the current fleet or with more nodes. Nothing changes." />
      <CapacityTabs part="what-if" />
      <Form form={form} file={file} busy={plan.isFetching} onChange={setForm} onFile={setFile} onSubmit={() => (isCurrent ? void plan.refetch() : setSubmitted({ form, file }))} />
      {submitted !== null && plan.isPending && <Loading subject="the plan" />}
      <Problem error={plan.error} onRetry={() => void plan.refetch()} />
      {plan.data !== undefined && plan.error === null && !isBlank(form) && (
        <>
          {!isCurrent && <p className="muted" role="status">The input has changed since this plan.</p>}
          <Planned plan={plan.data} />
        </>
      )}
    </div>
  );
}

interface FormProps {
  form: PlanForm;
  file: File | null;
  busy: boolean;
  onChange: (form: PlanForm) => void;
  onFile: (file: File | null) => void;
  onSubmit: () => void;
}

function Form({ form, file, busy, onChange, onFile, onSubmit }: FormProps): ReactNode {
  const fileInput = useRef<HTMLInputElement>(null);
  const [sent, setSent] = useState(false);
  const { data = [] } = useDefinitions();
  const problems = validateForm(form, file);
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    setSent(true);
    if (Object.keys(problems).length === 0) onSubmit();
  };
  const field: Field = (name, label, description) => (
    <TextField label={label} description={description} value={form[name]} problem={sent ? problems[name] : ""} numeric={!["model", "selector", "addLabels"].includes(name)} {...(name === "model" ? { suggestions: data.map(({ id }) => id) } : {})} onChange={(text) => onChange({ ...form, [name]: text })} />
  );
  const clear = () => {
    setSent(false);
    onFile(null);
    if (fileInput.current !== null) fileInput.current.value = "";
    onChange(BLANK);
  };
  return (
    <form className="nd-panel" noValidate onSubmit={submit}>
      <div className="cap-wish">
        <fieldset>
          <legend>What to place</legend>
          {field("model", "Model", "A defined model. Its own requirements and rule apply.")}
          <FileField input={fileInput} disabled={form.model.trim() !== ""} onFile={onFile} />
          {file !== null && field("context", "Context, tokens", "Empty: 8,192.")}
          {file === null && form.model.trim() === "" && (
            <div className="rule-pair">
              {field("vram", "VRAM it needs, GiB", "")}
              {field("disk", "Disk it needs, GiB", "")}
            </div>
          )}
          {field("replicas", "Replicas", "Empty: one.")}
          {field("selector", "Only nodes with", "Labels as key=value. Empty: the labels in the model's rule.")}
        </fieldset>
        <NewNodes field={field} />
      </div>
      <div className="row wrap">
        <Button type="submit" kind="primary" busy={busy}>
          Plan
        </Button>
        <Button onClick={clear}>Clear</Button>
      </div>
    </form>
  );
}

interface FileFieldProps {
  input: RefObject<HTMLInputElement | null>;
  disabled: boolean;
  onFile: (file: File | null) => void;
}

function FileField({ input, disabled, onFile }: FileFieldProps): ReactNode {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>Or a GGUF file on this computer</label>
      <input ref={input} id={id} className="input" type="file" accept=".gguf" disabled={disabled} aria-describedby={`${id}-said`} onChange={(event) => onFile(event.target.files?.[0] ?? null)} />
      <FieldMessage id={`${id}-said`} problem="" description="Only its first 16 MiB are sent." />
    </div>
  );
}

type Field = (name: keyof PlanForm, label: string, description: string) => ReactNode;

function NewNodes({ field }: { field: Field }): ReactNode {
  return (
    <fieldset>
      <legend>Current fleet plus</legend>
      {field("add", "New nodes", "Empty: none.")}
      <div className="rule-pair">
        {field("addVram", "VRAM of each, GiB", "")}
        {field("addDisk", "Disk of each, GiB", "Empty: not reported.")}
      </div>
      {field("addSlots", "Maximum replicas per model on each", "Empty: one.")}
      {field("addLabels", "Labels of each", "key=value, separated by commas.")}
    </fieldset>
  );
}

function Planned({ plan }: { plan: Plan }): ReactNode {
  const name = plan.model ?? "the replica";
  return (
    <section className="nd-panel" aria-label="The plan">
      <h2 role="status">
        {plan.placed} of {count(plan.wanted, "replica")} can be placed
      </h2>
      <ol className="cap-plan">
        {plan.decisions.map((decision) => (
          <li key={decision.replica}>
            <p className="anywhere">
              <strong>
                Replica {decision.replica}:{" "}
                {decision.outcome === "placed" ? <bdi>{slotOf(decision)}</bdi> : "no node"}
              </strong>{" "}
              {decision.hypothetical && <span className="tag">new node</span>} <bdi>{decision.reason}</bdi>
            </p>
            <details open={decision.outcome !== "placed" || undefined}>
              <summary>{decision.outcome === "placed" ? "Placement details" : "Why no node fits"}</summary>
              <Details decision={decision} name={`${name}, replica ${decision.replica}`} />
            </details>
          </li>
        ))}
      </ol>
      <h2>Memory for the first replica</h2>
      <Memory memory={plan.memory} name={name} need={plan.model === null ? undefined : plan.decisions[0]?.need} />
      {plan.placed < plan.wanted && plan.wanted - plan.placed > 1 && <p className="muted">Later replicas were not planned.</p>}
    </section>
  );
}
