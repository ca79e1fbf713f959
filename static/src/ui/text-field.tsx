// A field with its label, and under it what is wrong with what is in it, else a hint.
import { useId, type ReactNode } from "react";

interface TextFieldProps {
  label: string;
  value: string;
  onChange: (text: string) => void;
  description?: string;
  /** The problem with the value; "" if there is none. */
  problem?: string | undefined;
  numeric?: boolean;
  /** The id of a list of suggestions. */
  list?: string;
  /** A dialog's focus starts here. */
  first?: boolean;
}

export function TextField({ label, value, onChange, description = "", problem = "", numeric = false, list, first = false }: TextFieldProps): ReactNode {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <input
        id={id}
        className="input"
        value={value}
        autoComplete="off"
        autoCapitalize="none"
        spellCheck={false}
        inputMode={numeric ? "decimal" : "text"}
        aria-invalid={problem !== "" || undefined}
        aria-describedby={`${id}-said`}
        {...(list === undefined ? {} : { list })}
        {...(first ? { autoFocus: true, "data-first": "" } : {})}
        onChange={(event) => onChange(event.target.value)}
      />
      <FieldMessage id={`${id}-said`} problem={problem} description={description} />
    </div>
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
