// What a person may set for the answers, and the request that comes of it. Pure.
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

/** What is wrong, by field. */
export type Wrong = Partial<Record<keyof Settings, string>>;

const MOST_STOPS = 16;

export function wrongIn({ temperature, maxTokens, stop, seed }: Settings): Wrong {
  const wrong: Wrong = {};
  if (temperature.trim() !== "" && !(Number(temperature) >= 0 && Number(temperature) <= 2)) wrong.temperature = "Enter a number from 0 to 2.";
  if (maxTokens.trim() !== "" && !(whole(maxTokens) && Number(maxTokens) >= 1)) wrong.maxTokens = "Enter a whole number from 1.";
  if (stopsIn(stop).length > MOST_STOPS) wrong.stop = `At most ${MOST_STOPS}.`;
  if (seed.trim() !== "" && !whole(seed)) wrong.seed = "Enter a whole number.";
  return wrong;
}

function whole(text: string): boolean {
  return Number.isSafeInteger(Number(text));
}

function stopsIn(text: string): string[] {
  return text.split("\n").filter((line) => line !== "");
}

/** What is sent: the body without how it is to be answered. */
export interface Request {
  model: string;
  messages: Message[];
  temperature?: number;
  max_tokens?: number;
  stop?: string[];
  seed?: number;
}

export function requestOf(model: string, settings: Settings, said: readonly Message[]): Request {
  const { system, temperature, maxTokens, stop, seed } = settings;
  const messages: Message[] = system.trim() === "" ? [...said] : [{ role: "system", content: system }, ...said];
  return {
    model,
    messages,
    ...(temperature.trim() === "" ? {} : { temperature: Number(temperature) }),
    ...(maxTokens.trim() === "" ? {} : { max_tokens: Number(maxTokens) }),
    ...(stopsIn(stop).length === 0 ? {} : { stop: stopsIn(stop) }),
    ...(seed.trim() === "" ? {} : { seed: Number(seed) }),
  };
}
