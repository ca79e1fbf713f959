// The choice of the model, and the settings of its answers.
import { useId, type ReactNode } from "react";
import type { Definition } from "../models/rows";
import { Select, type Option } from "../ui/select";
import { FieldMessage, TextField } from "../ui/text-field";
import { canChat, stateWords } from "./models";
import type { Settings, FieldProblems } from "./settings";

interface ModelProps {
  model: string;
  definitions: readonly Definition[];
  /** By model, how many replicas of it are loaded; null for a person who is not told. */
  loaded: ReadonlyMap<string, number> | null;
  /** True if a load of the chosen one is under way. */
  loading: boolean;
  onChange: (model: string) => void;
}

export function ModelField({ model, definitions, loaded, loading, onChange }: ModelProps): ReactNode {
  const id = useId();
  const chosen = definitions.find((definition) => definition.id === model);
  const offered = definitions.filter((definition) => canChat(definition) || definition.id === model);
  const replicas = loaded?.get(model) ?? 0;
  const warnings = chosen?.warnings ?? [];
  const options = offered.map(({ id: name }): Option => [name, loaded === null ? name : `${name} (${stateWords(loaded.get(name) ?? 0)})`]);
  if (chosen === undefined) options.unshift([model, model === "" ? "Choose a model" : `${model} (not available)`]);
  return (
    <div className="field chat-model">
      <div className="row wrap">
        <Select label="Model" value={model} options={options} describedBy={`${id}-said`} onChange={onChange} />
        {chosen !== undefined && loaded !== null && <Standing replicas={replicas} loading={loading} />}
      </div>
      <p id={`${id}-said`} className="field-hint">
        {chosen !== undefined && loaded !== null && replicas === 0 && !loading ? "The first message loads this model." : ""}
      </p>
      {warnings.map((warning) => (
        <p key={warning} className="risk">
          {warning}
        </p>
      ))}
    </div>
  );
}

function Standing({ replicas, loading }: { replicas: number; loading: boolean }): ReactNode {
  if (replicas === 0 && loading) return <span className="pill info">loading</span>;
  return <span className={`pill ${replicas > 0 ? "good" : ""}`}>{stateWords(replicas)}</span>;
}

interface SettingsProps {
  settings: Settings;
  problems: FieldProblems;
  onChange: (settings: Settings) => void;
}

export function SettingsFields({ settings, problems, onChange }: SettingsProps): ReactNode {
  const change = (name: keyof Settings) => (text: string) => onChange({ ...settings, [name]: text });
  return (
    <div className="chat-settings">
      <Lines label="System prompt" description="Instructions before the conversation." value={settings.system} problem="" onChange={change("system")} />
      <Lines label="Stop sequences" description="One per line. The answer ends before the first of them." value={settings.stop} problem={problems.stop ?? ""} onChange={change("stop")} />
      <TextField label="Temperature" description="0 to 2. Empty: model default." numeric value={settings.temperature} problem={problems.temperature} onChange={change("temperature")} />
      <TextField label="Max tokens" description="Empty: model default." numeric value={settings.maxTokens} problem={problems.maxTokens} onChange={change("maxTokens")} />
      <TextField label="Seed" description="Same seed, same answer. Empty: random." numeric value={settings.seed} problem={problems.seed} onChange={change("seed")} />
    </div>
  );
}

interface LinesProps {
  label: string;
  description: string;
  value: string;
  problem: string;
  onChange: (text: string) => void;
}

function Lines({ label, description, value, problem, onChange }: LinesProps): ReactNode {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <textarea id={id} className="input" rows={2} dir="auto" value={value} aria-invalid={problem !== "" || undefined} aria-describedby={`${id}-said`} onChange={(event) => onChange(event.target.value)} />
      <FieldMessage id={`${id}-said`} problem={problem} description={description} />
    </div>
  );
}
