// An answer as it grows, and its figures. Pure.
import { grown, NO_BLOCKS, textOf, type Blocks } from "./blocks";
import type { Loading, Piece, Usage } from "./stream";
import type { Message } from "./settings";

export interface ToolCall {
  name: string;
  arguments: string;
}

export interface Answer {
  model: string;
  /** waiting: nothing of it has come. */
  state: "waiting" | "answering" | "done" | "stopped" | "failed";
  blocks: Blocks;
  reasoning: Blocks;
  tools: readonly ToolCall[];
  /** The ID of the node; "" if unknown. */
  node: string;
  /** Why it ended, in the engine's word; "" if it has not. */
  finish: string;
  usage: Usage | null;
  /** Times of this page in ms: when the request was sent, when the first piece came, when the last one did. */
  sentAt: number;
  firstAt: number | null;
  lastAt: number | null;
  /** True if no replica was there when it was sent: the time to the first token has the load in it. */
  cold: boolean;
  /** The state of the load in the last refusal. */
  loading: Loading | null;
  error: Error | null;
}

export interface Turn {
  id: number;
  question: string;
  answer: Answer;
}

export function newAnswer(model: string): Answer {
  return {
    model, cold: false, state: "waiting", blocks: NO_BLOCKS, reasoning: NO_BLOCKS, tools: [], node: "", finish: "", usage: null,
    sentAt: performance.now(), firstAt: null, lastAt: null, loading: null, error: null,
  };
}

export function isOpen({ state }: Answer): boolean {
  return state === "waiting" || state === "answering";
}

/** The answer with these pieces. */
export function extended(answer: Answer, pieces: readonly Piece[]): Answer {
  const text = pieces.map((piece) => piece.text).join("");
  const reasoning = pieces.map((piece) => piece.reasoning).join("");
  const tools = pieces.flatMap((piece) => piece.tools);
  const nonEmptyPieces = pieces.filter((piece) => piece.text !== "" || piece.reasoning !== "" || piece.tools.length > 0);
  return {
    ...answer,
    state: "answering",
    blocks: grown(answer.blocks, text),
    reasoning: grown(answer.reasoning, reasoning),
    tools: tools.reduce(withTool, answer.tools),
    finish: pieces.findLast((piece) => piece.finish !== "")?.finish ?? answer.finish,
    usage: pieces.findLast((piece) => piece.usage !== null)?.usage ?? answer.usage,
    firstAt: answer.firstAt ?? nonEmptyPieces[0]?.at ?? null,
    lastAt: nonEmptyPieces.at(-1)?.at ?? answer.lastAt,
  };
}

function withTool(toolCalls: readonly ToolCall[], { index, function: piece }: Piece["tools"][number]): ToolCall[] {
  const calls = [...toolCalls];
  const { name, arguments: previous } = calls[index] ?? { name: "", arguments: "" };
  calls[index] = { name: name + (piece?.name ?? ""), arguments: previous + (piece?.arguments ?? "") };
  return calls;
}

/** The messages so far: a question without an answer is left out, because many models require alternating turns. */
export function messagesOf(turns: readonly Turn[]): Message[] {
  return turns.flatMap(({ question, answer }): Message[] => {
    const text = textOf(answer.blocks);
    return text === "" ? [] : [{ role: "user", content: question }, { role: "assistant", content: text }];
  });
}

/** A shorter time between first and last piece measures the network rather than the engine. */
const LEAST_MS = 50;

/** Tokens a second after the first one; null if there are too few. */
export function speedOf({ usage, firstAt, lastAt }: Answer): number | null {
  if (usage === null || firstAt === null || lastAt === null || usage.completion_tokens < 2 || lastAt - firstAt < LEAST_MS) return null;
  return (1000 * (usage.completion_tokens - 1)) / (lastAt - firstAt);
}

const FINISHES: Readonly<Record<string, string>> = {
  stop: "finished",
  length: "cut off at the token limit (length)",
  tool_calls: "ended with a tool call",
};

/** The figures of an answer that has ended, as short lines. */
export function figuresOf(answer: Answer): string[] {
  const { usage, sentAt, firstAt, finish, cold } = answer;
  const speed = speedOf(answer);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return [
    ...(firstAt === null ? [] : [`first token after ${seconds(firstAt - sentAt)}${cold ? ", load included" : ""}`]),
    ...(speed === null ? [] : [`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`]),
    ...(usage === null ? [] : [`${usage.prompt_tokens} prompt + ${usage.completion_tokens} answer tokens`]),
    ...(usage === null || cached === undefined ? [] : [`${usage.prompt_tokens === 0 ? 0 : Math.round((100 * cached) / usage.prompt_tokens)}% of the prompt cached`]),
    ...(answer.state === "stopped" ? ["stopped"] : finish === "" ? [] : [FINISHES[finish] ?? `ended: ${finish}`]),
  ];
}

function seconds(ms: number): string {
  return ms < 10_000 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms / 1000)} s`;
}
