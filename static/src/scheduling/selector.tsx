// The labels that a node must have: those chosen as chips, one more being typed with suggestions from the live nodes,
// and at once how many nodes have them all.
import { useId, useRef, type KeyboardEvent, type ReactNode } from "react";
import { useThrottledNodes } from "../backends/throttled-nodes";
import { keyProblem, valueProblem, written } from "../nodes/shared/labels";
import { Button, IconButton } from "../ui/button";
import { FieldMessage, TextInput } from "../ui/text-field";
import { candidates, labelKeys, labelValues, matching, matchWords, selectorIn, type Draft } from "./rules";

interface SelectorProps {
  draft: Draft;
  selectorProblem: string;
  onChange: (target: Partial<Draft>) => void;
}

export function SelectorField({ draft, selectorProblem, onChange }: SelectorProps): ReactNode {
  const id = useId();
  const key = useRef<HTMLInputElement>(null);
  const nodes = candidates(useThrottledNodes().values());
  const problem = draft.key.trim() === "" ? "" : keyProblem(draft.key) || valueProblem(draft.value);
  const add = () => {
    if (draft.key.trim() === "" || problem !== "") return;
    onChange({ selector: selectorIn(draft), key: "", value: "" });
    key.current?.focus();
  };
  const remove = (name: string) => {
    onChange({ selector: Object.fromEntries(Object.entries(draft.selector).filter(([key]) => key !== name)) });
    key.current?.focus();
  };
  const enter = (event: KeyboardEvent) => {
    // In a label that is being typed Enter adds it; it does not send the rule.
    if (event.key !== "Enter" || draft.key.trim() === "") return;
    event.preventDefault();
    add();
  };
  return (
    <fieldset className="rule-selector">
      <legend>Node selector</legend>
      <p className="field-hint">Labels that a node must have. Without labels, every node can run the model.</p>
      <ul className="chips" aria-label="Labels of the selector">
        {Object.entries(draft.selector).map(([name, value]) => (
          <li key={name} className="nd-label">
            <bdi className="name">{written(name, value)}</bdi>
            <IconButton small name={`Remove label ${written(name, value)}`} glyph="✕" onClick={() => remove(name)} />
          </li>
        ))}
      </ul>
      <div className="nd-add" onKeyDown={enter}>
        <label className="field">
          <span>Label</span>
          <TextInput ref={key} suggestions={labelKeys(nodes)} value={draft.key} aria-describedby={`${id}-said`} onChange={(text) => onChange({ key: text })} />
        </label>
        <label className="field">
          <span>Value</span>
          <TextInput suggestions={labelValues(nodes, draft.key.trim())} value={draft.value} aria-describedby={`${id}-said`} onChange={(text) => onChange({ value: text })} />
        </label>
        <Button onClick={add} refusal={draft.key.trim() === "" ? "Enter a label." : problem}>
          Add
        </Button>
      </div>
      <FieldMessage id={`${id}-said`} problem={selectorProblem || problem} description="" />
      <Matches draft={draft} />
    </fieldset>
  );
}

/** The number of matching nodes; none, or none that works, is a warning and no refusal, because nodes may come. */
function Matches({ draft }: { draft: Draft }): ReactNode {
  const nodes = candidates(useThrottledNodes().values());
  const matches = matching(nodes, selectorIn(draft));
  const idle = matches.length > 0 && matches.every((node) => node.status !== "healthy");
  return (
    <div role="status" className={matches.length === 0 || idle ? "risk" : "rule-matches"}>
      <bdi>{matchWords(matches, nodes.length)}</bdi>
      {matches.length === 0 && <> ⚠ No node matches: the model cannot be loaded.</>}
      {idle && <> ⚠ No matching node is healthy now.</>}
    </div>
  );
}
