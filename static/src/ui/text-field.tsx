// Fields with their labels, and under a text field what is wrong with what is in it, else a hint.
import { useId, type ComponentProps, type ReactNode } from "react";

interface TextFieldProps {
  label: string;
  value: string;
  onChange: (text: string) => void;
  description?: string;
  /** The problem with the value; "" if there is none. */
  problem?: string | undefined;
  numeric?: boolean;
  suggestions?: readonly string[];
  /** A dialog's focus starts here. */
  first?: boolean;
}

export function TextField({ label, description = "", problem = "", numeric = false, first = false, ...input }: TextFieldProps): ReactNode {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <TextInput
        {...input}
        id={id}
        inputMode={numeric ? "decimal" : "text"}
        aria-invalid={problem !== "" || undefined}
        aria-describedby={`${id}-said`}
        {...(first ? { autoFocus: true, "data-first": "" } : {})}
      />
      <FieldMessage id={`${id}-said`} problem={problem} description={description} />
    </div>
  );
}

type TextInputProps = Omit<ComponentProps<"input">, "list" | "onChange"> & Pick<TextFieldProps, "onChange" | "suggestions">;

/** The input alone. The browser filters the suggestions by what is typed, and anything else may be typed. */
export function TextInput({ onChange, suggestions, ...input }: TextInputProps): ReactNode {
  const list = useId();
  return (
    <>
      <input className="input" autoComplete="off" autoCapitalize="none" spellCheck={false} {...input} list={suggestions && list} onChange={(event) => onChange(event.target.value)} />
      {suggestions !== undefined && (
        <datalist id={list}>
          {[...new Set(suggestions)].map((suggestion) => (
            <option key={suggestion} value={suggestion} />
          ))}
        </datalist>
      )}
    </>
  );
}

export function Checkbox({ label, on, onChange, describedBy }: { label: ReactNode; on: boolean; onChange: (on: boolean) => void; describedBy?: string }): ReactNode {
  return (
    <label className="row">
      <input type="checkbox" checked={on} aria-describedby={describedBy} onChange={(event) => onChange(event.target.checked)} />
      {label}
    </label>
  );
}

/** Under a field: what is wrong with it, else a hint. */
export function FieldMessage({ id, problem, description }: { id: string; problem: string; description: string }): ReactNode {
  return (
    <p id={id} className={problem === "" ? "field-hint" : "field-hint bad"} role={problem === "" ? undefined : "alert"}>
      {problem || description}
    </p>
  );
}
