// The dialog of one rule, new or edited. What the server refuses is said at its field, and nothing typed is lost.
import { useId, useState, type ReactNode, type SubmitEvent } from "react";
import { useAction } from "../api/action";
import { useDefinitions } from "../models/data";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Dialog } from "../ui/dialog";
import { Problem } from "../ui/problem";
import { Select, type Option } from "../ui/select";
import { Checkbox, FieldMessage, TextField } from "../ui/text-field";
import { BLANK, draftOf, refusedField, saveRule, useReread, useRules, validateDraft, type Draft, type Rule, type FieldProblems } from "./rules";
import { Preview } from "./preview";
import { SelectorField } from "./selector";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "./scheduling.css";

interface RuleDialogProps {
  /** The rule to change; null for a new one. */
  rule: Rule | null;
  /** The model of a new one, if it is known. */
  model?: string;
  onClose: () => void;
}

interface FormProps {
  draft: Draft;
  problems: FieldProblems;
  change: (target: Partial<Draft>) => void;
}

export function RuleDialog({ rule, model = "", onClose }: RuleDialogProps): ReactNode {
  const [draft, setDraft] = useState<Draft>(() => (rule === null ? { ...BLANK, model } : draftOf(rule)));
  const [sent, setSent] = useState(false);
  const rules = useRules().data;
  const reread = useReread();
  const save = useAction(saveRule, async (saved) => {
    await reread();
    announce(`Rule of ${saved.model_name} saved.`);
  });
  const change = (target: Partial<Draft>) => {
    setDraft((previous) => ({ ...previous, ...target }));
    if (save.error !== null) save.forget();
  };
  const refused = refusedField(save.error);
  const problems = validateDraft(draft);
  const shownProblems: FieldProblems = refused === null ? (sent ? problems : {}) : { [refused.field]: refused.words };
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    setSent(true);
    if (Object.keys(problems).length === 0 && rules !== undefined && !save.busy) save.run(draft, onClose);
  };
  const form = { draft, problems: shownProblems, change };
  const warning = rules === undefined || save.busy || save.succeeded ? "" : replacementWarning(rule, rules.find((present) => present.model_name === draft.model.trim()));
  return (
    <Dialog open onClose={onClose} title={rule === null ? "Add rule" : <>Edit rule of <bdi>{rule.model_name}</bdi></>}>
      <form className="stack" onSubmit={submit} noValidate>
        {rule === null && <ModelField {...form} />}
        {warning !== "" && <p className="risk">{warning}</p>}
        <SelectorField draft={draft} selectorProblem={shownProblems.node_selector ?? ""} onChange={change} />
        <ReplicaFields {...form} />
        <MoreFields {...form} />
        <Preview draft={draft} />
        {save.error !== null && refused === null && <Problem error={save.error} />}
        <div className="row wrap">
          <Button type="submit" kind="primary" busy={save.busy} refusal={rules === undefined ? "The present rules are not known yet" : ""}>
            Save rule
          </Button>
          <Button onClick={onClose}>Cancel</Button>
        </div>
      </form>
    </Dialog>
  );
}

/** What saving undoes that the person may not know: `present` is the model's rule now. "" for nothing. */
function replacementWarning(opened: Rule | null, present: Rule | undefined): string {
  if (opened === null) return present === undefined ? "" : "This model has a rule. Saving replaces it.";
  if (present === undefined) return "The rule was deleted in the meantime. Saving creates it again.";
  // Not by the time of the change, which passes set as well.
  return JSON.stringify(draftOf(present)) === JSON.stringify(draftOf(opened)) ? "" : "The rule has changed in the meantime. Saving replaces the newer values.";
}

function ModelField({ draft, problems, change }: FormProps): ReactNode {
  const { data = [] } = useDefinitions();
  const unknown = data.length > 0 && draft.model.trim() !== "" && !data.some((definition) => definition.id === draft.model.trim());
  return (
    <TextField
      label="Model"
      value={draft.model}
      problem={problems.model_name}
      description={unknown ? "No model with this name is defined yet." : ""}
      suggestions={data.map(({ id }) => id)}
      first
      onChange={(model) => change({ model })}
    />
  );
}

function ReplicaFields({ draft, problems, change }: FormProps): ReactNode {
  const messageId = useId();
  return (
    <>
      <div>
        <Checkbox label="One replica on every matching node" on={draft.spread} onChange={(spread) => change({ spread })} describedBy={messageId} />
        <FieldMessage id={messageId} problem={problems.spread_all ?? ""} description="" />
      </div>
      {!draft.spread && (
        <div className="rule-pair">
          <TextField label="Minimum replicas" value={draft.min} problem={problems.min_replicas} description="Empty or 0: loaded on request." numeric onChange={(min) => change({ min })} />
          <TextField label="Maximum replicas" value={draft.max} problem={problems.max_replicas} description="Empty or 0: no limit." numeric onChange={(max) => change({ max })} />
        </div>
      )}
    </>
  );
}

const POLICIES: readonly Option[] = [
  ["", "Cluster default"],
  ["round_robin", "Round robin"],
  ["prefix_cache", "Prefix cache"],
];

/** The routing fields; open if one is set or invalid. */
function MoreFields({ draft, problems, change }: FormProps): ReactNode {
  const id = useId();
  const [used] = useState([draft.policy, draft.prefix, draft.absolute, draft.relative].some((text) => text !== ""));
  const amiss = (["route_policy", "min_prefix_match", "balance_abs_threshold", "balance_rel_threshold"] as const).some((field) => problems[field] !== undefined);
  return (
    <details className="rule-more" open={used || amiss || undefined}>
      <summary>Request routing</summary>
      <div className="stack">
        <div>
          <Select label="Routing policy" value={draft.policy} options={POLICIES} describedBy={`${id}-said`} onChange={(policy) => change({ policy: policy as Draft["policy"] })} />
          <FieldMessage id={`${id}-said`} problem={problems.route_policy ?? ""} description="" />
        </div>
        <TextField label="Minimum prefix match" value={draft.prefix} problem={problems.min_prefix_match} description="0 to 1. Empty: cluster default." numeric onChange={(prefix) => change({ prefix })} />
        <div className="rule-pair">
          <TextField label="Absolute balance threshold" value={draft.absolute} problem={problems.balance_abs_threshold} description="Empty: cluster default." numeric onChange={(absolute) => change({ absolute })} />
          <TextField label="Relative balance threshold" value={draft.relative} problem={problems.balance_rel_threshold} description="At least 1. Empty: cluster default." numeric onChange={(relative) => change({ relative })} />
        </div>
      </div>
    </details>
  );
}
