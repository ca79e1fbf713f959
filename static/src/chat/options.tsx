// The choice of the model, and the settings of its answers.
import { useId, type ReactNode } from "react";
import type { Definition } from "../models/rows";
import { FieldMessage, TextField } from "../ui/text-field";
import { canChat, stateWords } from "./models";
import type { Settings, FieldProblems } from "./settings";

interface ModelProps {
  model: string;
  definitions: readonly Definition[];
  /** By model, how many replicas of it are loaded. */
  loaded: ReadonlyMap<string, number>;
  /** True if a load of the chosen one is under way. */
  loading: boolean;
  onChange: (model: string) => void;
}

export function ModelField({ model, definitions, loaded, loading, onChange }: ModelProps): ReactNode {
  const id = useId();
  const chosen = definitions.find((definition) => definition.id === model);
  const offered = definitions.filter((definition) => canChat(definition) || definition.id === model);
  const replicas = loaded.get(model) ?? 0;
  const warnings = chosen?.warnings ?? [];
  return (
    <div className="field chat-model">
      <label htmlFor={id}>Model</label>
      <div className="row wrap">
        <select id={id} className="input" value={model} aria-describedby={`${id}-said`} onChange={(event) => onChange(event.target.value)}>
          {model === "" && <option value="">Choose a model</option>}
          {model !== "" && chosen === undefined && <option value={model}>{model} (not defined)</option>}
          {offered.map((definition) => (
            <option key={definition.id} value={definition.id}>
              {definition.id} ({stateWords(loaded.get(definition.id) ?? 0)})
            </option>
          ))}
        </select>
        {chosen !== undefined && <Standing replicas={replicas} loading={loading} />}
      </div>
      <p id={`${id}-said`} className="field-hint">
        {chosen !== undefined && replicas === 0 && !loading ? "The first question loads it." : ""}
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
      <Lines label="System prompt" description="What the model is told before everything else." value={settings.system} problem="" onChange={change("system")} />
      <Lines label="Stop at" description="Each line is a text at which the answer ends." value={settings.stop} problem={problems.stop ?? ""} onChange={change("stop")} />
      <TextField label="Temperature" description="0 to 2. Empty: the model's own." numeric value={settings.temperature} problem={problems.temperature} onChange={change("temperature")} />
      <TextField label="Most tokens" description="Of an answer. Empty: the model's own." numeric value={settings.maxTokens} problem={problems.maxTokens} onChange={change("maxTokens")} />
      <TextField label="Seed" description="The same one gives the same answer again. Empty: another one each time." numeric value={settings.seed} problem={problems.seed} onChange={change("seed")} />
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
