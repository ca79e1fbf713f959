// Confirming that the last replicas of models may stop: each model by name, with a box of its own.
import type { ReactNode } from "react";

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
        <label key={model} className="row">
          <input type="checkbox" checked={confirmed.has(model)} onChange={(event) => set(model, event.target.checked)} />
          <bdi className="name">{model}</bdi>
        </label>
      ))}
    </fieldset>
  );
}
