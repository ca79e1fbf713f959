// REST, typed by the API's document. Every failure leaves as an `ApiError` that says what happened, where, and
// what can be done; a 401 also tells the session (`whenSignedOut`), so that a person can sign in over the page
// without losing what is typed.
import createClient from "openapi-fetch";
import type { paths } from "./schema";

/** The code of what was sent and not answered: nobody knows whether it was done. */
const UNANSWERED = "unanswered";

/** What a request failed with. `status` 0: the server could not be reached. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly field = "",
    readonly code = "",
    readonly retryAfter = 0,
    readonly requestId = "",
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

type Refused = (sentAt: number) => void;

const listeners = new Set<Refused>();

/** Calls `listener` when an answer says that nobody is signed in, with when it was asked (ms of this page); returns how to stop that. */
export function whenSignedOut(listener: Refused): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function cookie(name: string): string {
  const found = document.cookie.split("; ").find((pair) => pair.startsWith(`${name}=`));
  return found === undefined ? "" : decodeURIComponent(found.slice(name.length + 1));
}

/** How long an answer may take, in ms: a network that swallows everything leaves nothing waiting for ever. */
const PATIENCE_MS = 30_000;

async function patiently(request: Request): Promise<Response> {
  try {
    return await fetch(request, { signal: AbortSignal.any([request.signal, AbortSignal.timeout(PATIENCE_MS)]) });
  } catch (error) {
    if (!(error instanceof DOMException) || error.name !== "TimeoutError") throw error;
    throw new ApiError("The server does not answer.", 0, "", request.method === "GET" ? "" : UNANSWERED);
  }
}

export const client = createClient<paths>({ baseUrl: "/", credentials: "same-origin", fetch: patiently });

client.use({
  onRequest({ request }) {
    if (request.method !== "GET") request.headers.set("X-CSRFToken", cookie("csrftoken"));
    return request;
  },
});

/** The answer's body; raises `ApiError` for anything but a success. */
export async function call<Data>(request: Promise<Result<Data>>): Promise<Data> {
  const sentAt = performance.now();
  let result: Result<Data>;
  try {
    result = await request;
  } catch (error) {
    if (error instanceof ApiError || (error instanceof DOMException && error.name === "AbortError")) throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  const { data, error, response } = result;
  if (response.ok) return data as Data;
  const failure = explain(error, response);
  if (failure.status === 401) for (const listener of listeners) listener(sentAt);
  throw failure;
}

/** Reads the three shapes in which the API says no (§0.4). */
export function explain(body: unknown, response: Pick<Response, "status" | "headers">): ApiError {
  const outer = record(body);
  const inner = record(outer["error"]);
  const said = text(outer["error"]) || text(inner["message"]) || text(outer["message"]) || text(outer["detail"]);
  return new ApiError(
    said || standard(response.status),
    response.status,
    text(outer["field"]) || text(inner["field"]) || text(inner["param"]),
    text(outer["code"]) || text(inner["code"]),
    Number(response.headers.get("Retry-After")) || 0,
    response.headers.get("X-Request-Id") ?? "",
  );
}

function standard(status: number): string {
  if (status === 403) return "You may not do this.";
  if (status === 404) return "It is not there any more.";
  if (status === 429) return "Too many requests.";
  if (status >= 500) return "The server failed.";
  return `The server answered ${status}.`;
}

function record(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** What a person can do about a failure: the sentence beside the error. */
export function advice(error: ApiError): string {
  if (error.code === UNANSWERED) return "It may have been done all the same: look before you try again.";
  if (error.status === 0) return "Nothing was lost; try again when the connection is back.";
  if (error.status === 401) return "Sign in again; what you typed stays.";
  if (error.status === 403) return "Ask an administrator for the right to do it.";
  if (error.status === 409) return "Look at what changed, then decide again.";
  if (error.status === 429) return error.retryAfter ? `Try again in ${error.retryAfter} s.` : "Try again shortly.";
  if (error.status === 503) return error.retryAfter ? `Try again in ${error.retryAfter} s.` : "Try again shortly.";
  if (error.status >= 500) return "Try again; the log of the web process has it under the request id.";
  return "";
}
