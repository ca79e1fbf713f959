// One request and its stream: server-sent events in OpenAI's form become pieces. Bytes may be divided anywhere.
import { createParser } from "eventsource-parser";
import { ApiError, explain, send } from "../api/client";
import type { components } from "../api/schema";
import type { Request } from "./settings";

export type Loading = components["schemas"]["ModelLoading"];

/** The model is on its way; the same request will do later. */
export class StillLoading extends Error {
  constructor(readonly loading: Loading) {
    super(`${loading.model} is being loaded`);
  }
}

export interface ToolPiece {
  index: number;
  function?: { name?: string; arguments?: string };
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens: number };
}

/** A new piece of an answer. */
export interface Piece {
  text: string;
  reasoning: string;
  tools: readonly ToolPiece[];
  finish: string;
  usage: Usage | null;
  /** When it came, ms of this page. */
  at: number;
}

export interface Stream {
  /** The ID of the node that answers; "" if unknown. */
  node: string;
  pieces: AsyncIterable<Piece>;
}

const CHAT = "/v1/chat/completions";

/** Raises `StillLoading`, or `ApiError` for any other refusal. */
export async function startStream(request: Request, signal: AbortSignal): Promise<Stream> {
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  const response = await send(CHAT, body, signal);
  if (!response.ok || response.body === null) throw refusal(await response.json().catch(() => null), response);
  return { node: response.headers.get("X-LocalAI-Node") ?? "", pieces: pieces(response.body, response.headers) };
}

interface Refusal {
  error?: { type?: string };
  loading?: Loading;
}

function refusal(body: unknown, response: Response): Error {
  const { error, loading } = (body ?? {}) as Refusal;
  if (response.status === 503 && error?.type === "model_loading" && loading !== undefined) return new StillLoading(loading);
  return explain(body, response);
}

interface Chunk {
  choices?: { delta?: { content?: string | null; reasoning_content?: string; tool_calls?: ToolPiece[] }; finish_reason?: string | null }[];
  usage?: Usage | null;
  error?: unknown;
}

const DONE = "[DONE]";

/** The pieces of a body. Raises `ApiError` for an error event and for a body that ends too early. */
export async function* pieces(body: ReadableStream<Uint8Array>, headers: Headers): AsyncGenerator<Piece> {
  const messages: string[] = [];
  const parser = createParser({ onEvent: ({ data }) => messages.push(data) });
  const text = new TextDecoder();
  for await (const bytes of chunksOf(body)) {
    parser.feed(text.decode(bytes, { stream: true }));
    for (const data of messages.splice(0)) {
      if (data === DONE) return;
      yield pieceOf(JSON.parse(data) as Chunk, headers);
    }
  }
  throw new ApiError("The connection ended before the answer was complete.", 0);
}

async function* chunksOf(body: ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array> {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      yield value;
    }
  } finally {
    // To stop reading stops the engine.
    void reader.cancel().catch(() => undefined);
  }
}

async function read(reader: ReadableStreamDefaultReader<Uint8Array>): Promise<ReadableStreamReadResult<Uint8Array>> {
  try {
    return await reader.read();
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer ended.", 0);
  }
}

function pieceOf(chunk: Chunk, headers: Headers): Piece {
  if (chunk.error !== undefined) throw explain(chunk, { status: 500, headers });
  const [choice] = chunk.choices ?? [];
  return {
    text: choice?.delta?.content ?? "",
    reasoning: choice?.delta?.reasoning_content ?? "",
    tools: choice?.delta?.tool_calls ?? [],
    finish: choice?.finish_reason ?? "",
    usage: chunk.usage ?? null,
    at: performance.now(),
  };
}
