// The form of a definition: what the server read from the text, what is typed, and the changes between them. Pure.
import type { DefinitionForm } from "./shapes";

export type FormField = keyof DefinitionForm;

/** As typed; "" stands for the default of the backend. */
export type TypedForm = Readonly<Record<FormField, string>>;

const NUMBERS: readonly FormField[] = ["context_size", "parallel", "gpu_layers", "max_tokens"];
/** As many layers as fit. */
const AUTO = "auto";
const LEAST: Partial<Record<FormField, number>> = { context_size: 1, parallel: 1, gpu_layers: -1, max_tokens: 1 };

export function typedOf(form: DefinitionForm): TypedForm {
  const number = (value: number | string | null) => (value === null ? "" : String(value));
  return {
    context_size: number(form.context_size),
    parallel: number(form.parallel),
    gpu_layers: number(form.gpu_layers),
    max_tokens: number(form.max_tokens),
    template: form.template,
    options: form.options.join("\n"),
  };
}

/** Problems that the browser can detect, by field; the server checks the rest. */
export function problemsOf(typed: TypedForm): Partial<Record<FormField, string>> {
  const problems: Partial<Record<FormField, string>> = {};
  for (const field of NUMBERS) {
    const text = typed[field].trim();
    const least = LEAST[field] ?? 0;
    if (field === "gpu_layers" && text === AUTO) continue;
    if (text !== "" && !(Number.isSafeInteger(Number(text)) && Number(text) >= least)) problems[field] = `Enter a whole number from ${least}, or leave it empty.`;
  }
  return problems;
}

/** The fields that differ from the definition; null removes a number, and with it the definition's own. */
export function changesOf(form: DefinitionForm, typed: TypedForm): Record<string, unknown> {
  const before = typedOf(form);
  const changed = (Object.keys(before) as FormField[]).filter((field) => before[field] !== typed[field]);
  return Object.fromEntries(changed.map((field) => [field, valueOf(field, typed[field])]));
}

/** What is typed, on top of a newer definition: fields that nobody typed in follow it. */
export function rebased(before: DefinitionForm, newest: DefinitionForm, typed: TypedForm): TypedForm {
  const old = typedOf(before);
  const own = Object.entries(typed).filter(([field, text]) => old[field as FormField] !== text);
  return { ...typedOf(newest), ...Object.fromEntries(own) };
}

function valueOf(field: FormField, text: string): unknown {
  if (field === "template") return text;
  if (field === "options") return text.split("\n").map((line) => line.trim()).filter((line) => line !== "");
  const value = text.trim();
  return value === "" ? null : value === AUTO ? AUTO : Number(value);
}

/** The offset of a place in a text; lines and columns count from 1. */
export function offsetOf(text: string, line: number, column: number): number {
  const lines = text.split("\n");
  const before = lines.slice(0, line - 1).reduce((sum, part) => sum + part.length + 1, 0);
  return Math.min(before + Math.min(Math.max(column - 1, 0), lines[line - 1]?.length ?? 0), text.length);
}
