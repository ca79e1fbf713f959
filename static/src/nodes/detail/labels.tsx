// The node's labels, edited in place. Each says who set it, because that decides who may set it again.
import { useId, useRef, useState, type ReactNode, type SubmitEvent } from "react";
import { ApiError } from "../../api/client";
import type { LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button, IconButton } from "../../ui/button";
import { goOnAt } from "../../ui/move-focus";
import { Problem } from "../../ui/problem";
import { FieldMessage, TextInput } from "../../ui/text-field";
import { Tip } from "../../ui/tip";
import { isAutomatic, keyProblem, listedLabels, valueProblem, written } from "../shared/labels";
import { mergeLabels, removeLabel } from "../shared/verbs";
import { useNodeAction, type NodeDetail } from "./data";
import { Panel } from "./panel";

type Sources = NodeDetail["label_sources"];
type Source = Sources[string];

const MEANING: Readonly<Record<Source, string>> = {
  worker: "Set by the worker, and again at each registration.",
  auto: "Set automatically, and again at each registration.",
  admin: "Set by an administrator; the worker does not change it.",
};
const MARK: Readonly<Record<Source, string>> = { worker: "worker", auto: "automatic", admin: "admin" };

export function Labels({ node, sources }: { node: LiveNode; sources: Sources | undefined }): ReactNode {
  const key = useRef<HTMLInputElement>(null);
  const list = useRef<HTMLUListElement>(null);
  const [draft, setDraft] = useState({ key: "", value: "" });
  const labels = listedLabels(node);
  const [removed, setRemoved] = useState<Draft | null>(null);
  const remove = useNodeAction(
    node.id,
    ({ key: name }: Draft) => removeLabel(node.id, name),
    (_, label) => {
      setRemoved(label);
      announce(`Label ${label.key} removed. You can undo this.`);
      goOnAt(key.current, list.current);
    },
  );
  const restored = (label: Draft) => {
    setRemoved((last) => (last === label ? null : last));
    goOnAt(key.current, list.current);
  };
  return (
    <Panel title="Labels">
      {labels.length === 0 && <p className="muted">No labels. Scheduling rules select nodes by label.</p>}
      <ul ref={list} className="nd-labels">
        {labels.map(([name, value]) => (
          <Chip
            key={name}
            text={written(name, value)}
            source={sources?.[name] ?? (isAutomatic(name) ? "auto" : undefined)}
            busy={remove.busy && remove.input?.key === name}
            onRemove={() => remove.run({ key: name, value })}
            onEdit={() => {
              setDraft({ key: name, value });
              key.current?.focus();
            }}
          />
        ))}
      </ul>
      {remove.error !== null && (
        <Problem error={remove.error} {...(remove.input === undefined ? {} : { onRetry: () => remove.run(remove.input as Draft) })} onDismiss={remove.forget} />
      )}
      <UndoRemoval node={node} removed={removed} onRestored={restored} />
      <AddLabel node={node} draft={draft} setDraft={setDraft} keyInput={key} />
    </Panel>
  );
}

interface UndoProps {
  node: LiveNode;
  /** The label that was removed last. */
  removed: Draft | null;
  onRestored: (label: Draft) => void;
}

/** Offers to put the removed label back as long as the node has no label of this key. */
function UndoRemoval({ node, removed, onRestored }: UndoProps): ReactNode {
  const restore = useNodeAction(
    node.id,
    ({ key, value }: Draft) => mergeLabels(node.id, { [key]: value }),
    (_, label) => {
      announce(`Label ${label.key} restored.`);
      onRestored(label);
    },
  );
  return (
    <>
      {removed !== null && !Object.hasOwn(node.labels, removed.key) && (
        <p className="row wrap nd-source">
          <span className="muted anywhere">
            Removed <bdi>{written(removed.key, removed.value)}</bdi>.
          </span>
          <Button small busy={restore.busy} aria-label={`Undo: restore label ${written(removed.key, removed.value)}`} onClick={() => restore.run(removed)}>
            Undo
          </Button>
        </p>
      )}
      <Problem error={restore.error} onDismiss={restore.forget} />
    </>
  );
}

interface ChipProps {
  text: string;
  source: Source | undefined;
  busy: boolean;
  onEdit: () => void;
  onRemove: () => void;
}

function Chip({ text, source, busy, onEdit, onRemove }: ChipProps): ReactNode {
  const mine = source === "auto" ? undefined : onEdit;
  return (
    <li className="nd-label">
      {mine === undefined ? (
        <bdi className="name">{text}</bdi>
      ) : (
        <button type="button" className="nd-label-text" aria-label={`Change label ${text}`} onClick={mine}>
          <bdi className="name">{text}</bdi>
        </button>
      )}
      {source !== undefined && (
        <Tip text={MEANING[source]}>
          <span className="nd-mark" tabIndex={0}>
            {MARK[source]}
          </span>
        </Tip>
      )}
      <IconButton
        small
        busy={busy}
        name={`Remove label ${text}${source === "worker" || source === "auto" ? ` (${MEANING[source]})` : ""}`}
        glyph="✕"
        onClick={onRemove}
      />
    </li>
  );
}

interface Draft {
  key: string;
  value: string;
}

interface AddProps {
  node: LiveNode;
  draft: Draft;
  setDraft: (draft: Draft) => void;
  keyInput: React.RefObject<HTMLInputElement | null>;
}

function AddLabel({ node, draft, setDraft, keyInput }: AddProps): ReactNode {
  const messageId = useId();
  const form = useRef<HTMLFormElement>(null);
  const label = { key: draft.key.trim(), value: draft.value };
  const add = useNodeAction(
    node.id,
    ({ key, value }: Draft) => mergeLabels(node.id, { [key]: value }),
    (_, { key, value }) => {
      announce(`Label ${written(key, value)} set.`);
      // The next one may be begun already.
      if (draft.key.trim() !== key || draft.value !== value) return;
      setDraft({ key: "", value: "" });
      goOnAt(keyInput.current, form.current);
    },
  );
  const change = (target: Partial<Draft>) => {
    setDraft({ ...draft, ...target });
    if (add.error !== null) add.forget();
  };
  const problem = keyProblem(label.key) || valueProblem(label.value);
  const refused = add.error instanceof ApiError && add.error.status === 400 ? add.error.message : "";
  // Nothing is wrong with an empty form yet.
  const shownProblem = refused || (label.key === "" ? "" : problem);
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (problem === "" && !add.busy) add.run(label);
  };
  const previous = Object.hasOwn(node.labels, label.key) ? node.labels[label.key] : undefined;
  return (
    <form ref={form} className="stack" onSubmit={submit}>
      <div className="nd-add">
        <label className="field">
          <span>Key</span>
          <TextInput ref={keyInput} value={draft.key} aria-invalid={shownProblem !== "" || undefined} aria-describedby={messageId} onChange={(key) => change({ key })} />
        </label>
        <label className="field">
          <span>Value</span>
          <TextInput value={draft.value} aria-describedby={messageId} onChange={(value) => change({ value })} />
        </label>
        <Button type="submit" busy={add.busy} refusal={problem}>
          {previous === undefined ? "Add" : "Change"}
        </Button>
      </div>
      <FieldMessage id={messageId} problem={shownProblem} description={previous === undefined ? "" : `Current value: ${previous === "" ? "empty" : previous}`} />
      {add.error !== null && refused === "" && <Problem error={add.error} onRetry={() => add.run(label)} />}
    </form>
  );
}
