// REST, typed by the API's document. Every failure leaves as an `ApiError` that says what happened, where, and
// what can be done; a 401 also tells the session (`whenSignedOut`), so that a person can sign in over the page
// without losing what is typed.
import createClient from "openapi-fetch";
import { Listeners } from "../lib/listeners";
import type { paths } from "./schema";

/** The code of what was sent and not answered: no one knows whether it was done. */
const UNANSWERED = "unanswered";

/** A node that cannot take a request, and why. */
export interface NodeRefusal {
  id: string;
  name: string;
  reason: string;
}

/** The failure of a request. `status` 0: the server could not be reached. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly field = "",
    readonly code = "",
    readonly retryAfter = 0,
    readonly requestId = "",
    /** Sentences by field, of an answer that names all that is wrong. */
    readonly fields: Readonly<Record<string, readonly string[]>> = {},
    /** Models whose last replica would stop: the same request goes through when it confirms them. */
    readonly lastReplicas: readonly string[] = [],
    /** Nodes that cannot take a request for many: nothing has started. */
    readonly refusals: readonly NodeRefusal[] = [],
  ) {
    super(message);
    this.name = "ApiError";
  }
}

interface Result<Data> {
  data?: Data;
  error?: unknown;
  response: Response;
}

const refusals = new Listeners<[sentAt: number]>();

/** Calls a function after a 401, with the time of the request (ms of this page); returns a function that unsubscribes. */
export const whenSignedOut = refusals.subscribe;

function cookie(name: string): string {
  const cookiePair = document.cookie.split("; ").find((pair) => pair.startsWith(`${name}=`));
  return cookiePair === undefined ? "" : decodeURIComponent(cookiePair.slice(name.length + 1));
}

/** Sends a request for at most a time in ms: a network that drops everything leaves nothing waiting without an end. */
function within(milliseconds: number) {
  return async (request: Request): Promise<Response> => {
    try {
      return await fetch(request, { signal: AbortSignal.any([request.signal, AbortSignal.timeout(milliseconds)]) });
    } catch (error) {
      if (!(error instanceof DOMException) || error.name !== "TimeoutError") throw error;
      throw new ApiError("The server is not responding.", 0, "", request.method === "GET" ? "" : UNANSWERED);
    }
  };
}

export const client = createClient<paths>({ baseUrl: "/", credentials: "same-origin", fetch: within(30_000) });

/** Options of a request that sends a large body, or for which the server waits for others, such as galleries: up to 140 s. */
export const patient = { fetch: within(150_000) };

client.use({
  onRequest({ request }) {
    if (request.method !== "GET") request.headers.set("X-CSRFToken", cookie("csrftoken"));
    return request;
  },
});

/**
 * Sends what is answered piece by piece, for as long as that takes; a refusal is an answer too. Raises `ApiError` if
 * nothing answers.
 */
export async function send(path: string, body: unknown, signal: AbortSignal): Promise<Response> {
  const sentAt = performance.now();
  const headers = { "Content-Type": "application/json", "X-CSRFToken": cookie("csrftoken") };
  const sent = { method: "POST", credentials: "same-origin", headers, body: JSON.stringify(body), signal } as const;
  try {
    const response = await fetch(path, sent);
    if (response.status === 401) notifySignedOut(sentAt);
    return response;
  } catch (error) {
    throw unreachable(error);
  }
}

function unreachable(error: unknown): Error {
  if (error instanceof ApiError || (error instanceof DOMException && error.name === "AbortError")) return error;
  return new ApiError("The server is unreachable.", 0);
}

function notifySignedOut(sentAt: number): void {
  refusals.notify(sentAt);
}

/** The answer's body; raises `ApiError` for anything but a success. */
export async function call<Data>(request: Promise<Result<Data>>): Promise<Data> {
  const sentAt = performance.now();
  let result: Result<Data>;
  try {
    result = await request;
  } catch (error) {
    throw unreachable(error);
  }
  const { data, error, response } = result;
  if (response.ok) return data as Data;
  const failure = explain(error, response);
  if (failure.status === 401) notifySignedOut(sentAt);
  throw failure;
}

/** Parses the three shapes of the API's refusals (§0.4). */
export function explain(body: unknown, response: Pick<Response, "status" | "headers">): ApiError {
  const outer = record(body);
  const inner = record(outer["error"]);
  const message = text(outer["error"]) || text(inner["message"]) || text(outer["message"]) || text(outer["detail"]);
  return new ApiError(
    message || standard(response.status),
    response.status,
    text(outer["field"]) || text(inner["field"]) || text(inner["param"]),
    text(outer["code"]) || text(inner["code"]),
    Number(response.headers.get("Retry-After")) || 0,
    response.headers.get("X-Request-Id") ?? "",
    sentences(record(outer["fields"])),
    texts(outer["last_replicas"]),
    nodeRefusals(outer["refusals"] ?? inner["refusals"]),
  );
}

/** The refused nodes in an answer. */
export function nodeRefusals(value: unknown): NodeRefusal[] {
  return Array.isArray(value) ? value.map(record).map((node) => ({ id: text(node["node_id"]), name: text(node["node_name"]), reason: text(node["reason"]) })) : [];
}

function standard(status: number): string {
  if (status === 403) return "You do not have permission to do this.";
  if (status === 404) return "This object no longer exists.";
  if (status === 429) return "Too many requests.";
  if (status >= 500) return "Internal server error";
  return `The server answered ${status}.`;
}

function sentences(fields: Record<string, unknown>): Record<string, string[]> {
  const lists = Object.entries(fields).map(([name, messages]) => [name, texts(messages)] as const);
  return Object.fromEntries(lists);
}

function record(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
}

function texts(value: unknown): string[] {
  return Array.isArray(value) ? value.map(text) : [];
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** The advice for a failure: the sentence beside the error. */
export function advice(error: ApiError): string {
  if (error.code === UNANSWERED) return "The request may have succeeded. Check before you try again.";
  if (error.status === 0) return "Your input is kept. Try again when the connection is back.";
  if (error.status === 401) return "Sign in again. Your input is kept.";
  if (error.status === 403) return "Ask an administrator for permission.";
  if (error.status === 409) return "Check what changed, then try again.";
  if (error.status === 429) return error.retryAfter ? `Try again in ${error.retryAfter} s.` : "Try again shortly.";
  if (error.status === 503) return error.retryAfter ? `Try again in ${error.retryAfter} s.` : "Try again shortly.";
  if (error.status >= 500) return "Try again. The server log has details under the request ID.";
  return "";
}
