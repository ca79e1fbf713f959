// The fields of a filter bar, as History and Changes have them.
import { useId, type ReactNode } from "react";
import { Select, type Option } from "../ui/select";

/** The search starts when typing pauses. */
export const SEARCH_AFTER_MS = 300;

interface FieldProps {
  label: string;
  value: string;
  onChange: (value: string) => void;
}

export function Choice({ options, ...field }: FieldProps & { options: readonly Option[] }): ReactNode {
  return <Select {...field} options={[["", "Any"], ...options]} />;
}

export function Words({ label, value, onChange, placeholder = "exact name" }: FieldProps & { placeholder?: string }): ReactNode {
  const id = useId();
  return (
    <label className="field" htmlFor={id}>
      <span>{label}</span>
      <input id={id} className="input" type="search" placeholder={placeholder} autoComplete="off" value={value} onChange={(event) => onChange(event.target.value)} />
    </label>
  );
}
