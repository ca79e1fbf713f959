// The settings of answers, and the request that they make. Pure.
export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

/** As typed; empty: the model's own. */
export interface Settings {
  system: string;
  temperature: string;
  maxTokens: string;
  stop: string;
  seed: string;
}

export const UNSET: Settings = { system: "", temperature: "", maxTokens: "", stop: "", seed: "" };

/** Problems by field. */
export type FieldProblems = Partial<Record<keyof Settings, string>>;

const MOST_STOPS = 16;

export function wrongIn({ temperature, maxTokens, stop, seed }: Settings): FieldProblems {
  const problems: FieldProblems = {};
  if (temperature.trim() !== "" && !(Number(temperature) >= 0 && Number(temperature) <= 2)) problems.temperature = "Enter a number from 0 to 2.";
  if (maxTokens.trim() !== "" && !(isInteger(maxTokens) && Number(maxTokens) >= 1)) problems.maxTokens = "Enter a whole number from 1.";
  if (stopsIn(stop).length > MOST_STOPS) problems.stop = `At most ${MOST_STOPS}.`;
  if (seed.trim() !== "" && !isInteger(seed)) problems.seed = "Enter a whole number.";
  return problems;
}

function isInteger(text: string): boolean {
  return Number.isSafeInteger(Number(text));
}

function stopsIn(text: string): string[] {
  return text.split("\n").filter((line) => line !== "");
}

/** The request's body without the parameters of the answer. */
export interface Request {
  model: string;
  messages: Message[];
  temperature?: number;
  max_tokens?: number;
  stop?: string[];
  seed?: number;
}

export function requestOf(model: string, settings: Settings, history: readonly Message[]): Request {
  const { system, temperature, maxTokens, stop, seed } = settings;
  const messages: Message[] = system.trim() === "" ? [...history] : [{ role: "system", content: system }, ...history];
  return {
    model,
    messages,
    ...(temperature.trim() === "" ? {} : { temperature: Number(temperature) }),
    ...(maxTokens.trim() === "" ? {} : { max_tokens: Number(maxTokens) }),
    ...(stopsIn(stop).length === 0 ? {} : { stop: stopsIn(stop) }),
    ...(seed.trim() === "" ? {} : { seed: Number(seed) }),
  };
}
