// A value that is edited where it stands: the pencil opens it, Enter saves, Escape cancels, an unchanged value only
// closes. What is typed stays until it is saved or cancelled, no matter what the server says.
import { useEffect, useId, useRef, useState, type KeyboardEvent, type ReactNode, type SubmitEvent } from "react";
import { ApiError } from "../../api/client";
import { Button, IconButton } from "../../ui/button";
import { Confirm } from "../../ui/dialog";
import { Problem } from "../../ui/problem";
import { FieldMessage } from "../../ui/text-field";
import type { Action } from "../../api/action";
import { decide, overtaken } from "./editing";

interface InlineEditProps {
  /** The name of the value, as in "Edit maximum replicas per model". */
  name: string;
  /** The present value, as it would be typed. */
  value: string;
  /** The problem with a text; "" if there is none. */
  check: (text: string) => string;
  action: Action<string>;
  /** The question to confirm before this value is saved; null if there is none. */
  confirm?: (value: string) => ReactNode | null;
  /** The meaning of the typed text. */
  meaning?: (text: string) => string;
  numeric?: boolean;
  placeholder?: string;
  /** The value as it is shown. */
  children: ReactNode;
}

export function InlineEdit(props: InlineEditProps): ReactNode {
  const [editing, setEditing] = useState(false);
  const pencil = useRef<HTMLButtonElement>(null);
  const wasEditing = useRef(false);
  useEffect(() => {
    // The focus returns to where it came from.
    if (wasEditing.current && !editing) pencil.current?.focus();
    wasEditing.current = editing;
  }, [editing]);
  if (editing) return <Editor {...props} onClose={() => setEditing(false)} />;
  return (
    <span className="row">
      <span className="nd-value">{props.children}</span>
      <IconButton ref={pencil} small name={`Edit ${props.name}`} glyph="✎" onClick={() => setEditing(true)} />
    </span>
  );
}

type EditorProps = InlineEditProps & { onClose: () => void };

interface Edit {
  text: string;
  change: (typed: string) => void;
  submit: () => void;
  /** The value without a further question. */
  save: (value: string) => void;
  /** The problem with the text; "" if there is none. */
  problem: string;
  /** A failure for another reason than the text. */
  failure: Error | null;
  question: ReactNode;
  withdraw: () => void;
}

function useEdit({ value, check, action, confirm, onClose }: EditorProps): Edit {
  const [text, setText] = useState(value);
  const [refusal, setRefusal] = useState("");
  const [question, setQuestion] = useState<ReactNode>(null);
  const { run, forget, busy, error } = action;
  // A failure of an earlier edit does not concern this one.
  useEffect(forget, [forget]);
  const save = (value: string) => {
    setQuestion(null);
    run(value, onClose);
  };
  const submit = () => {
    if (busy) return;
    const decision = decide(text, value, check);
    if (decision.kind === "close") onClose();
    else if (decision.kind === "refuse") setRefusal(decision.why);
    else {
      const question = confirm?.(decision.value) ?? null;
      if (question === null) save(decision.value);
      else setQuestion(question);
    }
  };
  const change = (typed: string) => {
    setText(typed);
    setRefusal("");
    if (error !== null) forget();
  };
  const problem = refusal || (error instanceof ApiError && error.status === 400 ? error.message : "");
  return { text, change, submit, save, problem, failure: problem === "" ? error : null, question, withdraw: () => setQuestion(null) };
}

function Editor(props: EditorProps): ReactNode {
  const { name, value, action } = props;
  const { text, change, submit, save, problem, failure, question, withdraw } = useEdit(props);
  const [opened] = useState(value);
  const moved = overtaken(opened, value) ? `Changed in the meantime to ${value === "" ? "empty" : value}.` : "";
  return (
    <>
      <EditForm {...props} text={text} problem={problem} busy={action.busy} moved={moved} onChange={change} onSubmit={submit} />
      <Problem error={failure} onRetry={submit} />
      <Confirm open={question !== null} onClose={withdraw} title={`Save ${name}?`} action="Save" onConfirm={() => save(text.trim())}>
        {question}
      </Confirm>
    </>
  );
}

interface FormProps extends InlineEditProps {
  text: string;
  problem: string;
  busy: boolean;
  moved: string;
  onChange: (text: string) => void;
  onSubmit: () => void;
  onClose: () => void;
}

function EditForm(props: FormProps): ReactNode {
  const { name, text, problem, busy, moved, meaning, numeric = false, placeholder, onClose } = props;
  const input = useRef<HTMLInputElement>(null);
  const messageId = useId();
  useEffect(() => input.current?.select(), []);
  const escape = (event: KeyboardEvent) => {
    // Escape in the question above it answers the question.
    if (event.key === "Escape" && !event.defaultPrevented) onClose();
  };
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    props.onSubmit();
  };
  return (
    <form className="stack nd-edit" onSubmit={submit} noValidate>
      <div className="row">
        <input
          ref={input}
          className="input"
          value={text}
          aria-label={name}
          aria-invalid={problem !== "" || undefined}
          aria-describedby={messageId}
          inputMode={numeric ? "numeric" : "text"}
          placeholder={placeholder}
          autoComplete="off"
          onChange={(event) => props.onChange(event.target.value)}
          onKeyDown={escape}
        />
        <Button small type="submit" kind="primary" busy={busy}>
          Save
        </Button>
        <Button small onClick={onClose}>
          Cancel
        </Button>
      </div>
      <FieldMessage id={messageId} problem={problem} description={[meaning?.(text) ?? "", moved].join(" ").trim()} />
    </form>
  );
}
