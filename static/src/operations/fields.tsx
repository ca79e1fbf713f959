// The fields of a filter bar, as History and Changes have them.
import { useEffect, useId, useState, type ReactNode } from "react";
import { Select, type Option } from "../ui/select";

/** The search starts when typing pauses. */
const SETTLED_MS = 300;

/** The filters once typing rests. */
export function useSettled<Filters>(filters: Filters): Filters {
  const [settled, setSettled] = useState(filters);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(filters), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [filters]);
  return settled;
}

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
