// Streams and a server for the tests of the chat page.
import { vi } from "vitest";

/** A body that comes in these parts. */
export function bodyOf(parts: readonly (string | Uint8Array)[]): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  return new ReadableStream({
    start(controller) {
      for (const part of parts) controller.enqueue(typeof part === "string" ? encoder.encode(part) : part);
      controller.close();
    },
  });
}

export function event(content: unknown): string {
  return `data: ${JSON.stringify(content)}\n\n`;
}

export const DONE = "data: [DONE]\n\n";

export function contentEvent(content: string, overrides: Record<string, unknown> = {}): string {
  return event({ choices: [{ index: 0, delta: { content, ...overrides }, finish_reason: null }], usage: null });
}

export function ended(reason: string, usage: Record<string, unknown> = { prompt_tokens: 10, completion_tokens: 4 }): string {
  return event({ choices: [{ index: 0, delta: {}, finish_reason: reason }], usage: null }) + event({ choices: [], usage });
}

/** An answer that a test lets come piece by piece. */
export class Open {
  readonly response: Response;
  private readonly encoder = new TextEncoder();
  private controller: ReadableStreamDefaultController<Uint8Array> | undefined;

  constructor(node = "") {
    const body = new ReadableStream<Uint8Array>({
      start: (controller) => {
        this.controller = controller;
      },
    });
    this.response = new Response(body, { headers: { "X-LocalAI-Node": node } });
  }

  send(...parts: string[]): void {
    for (const part of parts) this.controller?.enqueue(this.encoder.encode(part));
  }

  /** As the browser ends the body of a request that is called off. */
  readonly cut = (): void => this.controller?.error(new DOMException("stopped", "AbortError"));
}

export interface Sent {
  path: string;
  body: { messages: { role: string; content: string }[] } & Record<string, unknown>;
  headers: Record<string, string>;
  signal: AbortSignal;
}

/** Answers requests by these, one after the other; what was sent. */
export function serve(...answers: (Response | Error | Open)[]): Sent[] {
  const sent: Sent[] = [];
  vi.stubGlobal("fetch", (path: string, { body, headers, signal }: { body: string; headers: Record<string, string>; signal: AbortSignal }) => {
    sent.push({ path, body: JSON.parse(body) as Sent["body"], headers, signal });
    const answer = answers.shift();
    return new Promise<Response>((resolve, reject) => {
      signal.addEventListener("abort", () => reject(new DOMException("stopped", "AbortError")));
      if (answer instanceof Error) reject(answer);
      else if (answer instanceof Open) {
        signal.addEventListener("abort", answer.cut);
        resolve(answer.response);
      } else if (answer !== undefined) resolve(answer);
    });
  });
  return sent;
}

export function fullResponse(...parts: string[]): Response {
  return new Response(bodyOf([...parts, DONE]));
}

export function refused(status: number, error: Record<string, unknown>, overrides: Record<string, unknown> = {}, headers: Record<string, string> = {}): Response {
  return new Response(JSON.stringify({ error, ...overrides }), { status, headers });
}
