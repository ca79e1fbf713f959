// Confirming that the last replicas of models may stop: each model by name, with a box of its own.
import type { ReactNode } from "react";
import { Checkbox } from "../ui/text-field";

interface ConfirmationsProps {
  models: readonly string[];
  confirmed: ReadonlySet<string>;
  onChange: (confirmed: ReadonlySet<string>) => void;
}

export function Confirmations({ models, confirmed, onChange }: ConfirmationsProps): ReactNode {
  if (models.length === 0) return null;
  const set = (model: string, on: boolean) => onChange(new Set(on ? [...confirmed, model] : [...confirmed].filter((confirmedModel) => confirmedModel !== model)));
  return (
    <fieldset className="stack plain-fieldset">
      <legend>No other node serves these models. Confirm that their last replica may stop:</legend>
      {models.map((model) => (
        <Checkbox key={model} label={<bdi className="name">{model}</bdi>} on={confirmed.has(model)} onChange={(on) => set(model, on)} />
      ))}
    </fieldset>
  );
}
