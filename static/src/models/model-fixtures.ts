// Definitions as the server sends them, for unit tests of the pages of models.
import { vi } from "vitest";
import { client } from "../api/client";
import type { DefinitionDetail, DefinitionForm, DefinitionPreview, DefinitionRow } from "./shapes";

export function definition(name: string, overrides: Partial<DefinitionRow> = {}): DefinitionRow {
  return {
    name, backend: "llama-cpp", model: `${name}.gguf`, origin: "editor", state: "active", revision: 1, size: 1024 ** 3, context_size: 8192,
    use_cases: ["chat"], updated_at: "2026-08-22T10:00:00Z", actor: "ada", problem: "", ...overrides,
  };
}

export const FORM: DefinitionForm = { context_size: 8192, parallel: null, gpu_layers: null, template: "", options: [], max_tokens: null };

export function detail(name: string, overrides: Partial<DefinitionDetail> = {}): DefinitionDetail {
  return {
    name, text: `name: ${name}\nbackend: llama-cpp\ncontext_size: 8192\n`, origin: "editor", state: "active", shadowed: false, file: "", revision: 3,
    form: FORM,
    size: 1024 ** 3, files: [{ path: `${name}.gguf`, size: 1024 ** 3, present: true, source: "" }], updated_at: "2026-08-22T10:00:00Z", actor: "ada", warnings: [], error: "", ...overrides,
  };
}

export function previewOf(name: string, overrides: Partial<DefinitionPreview> = {}): DefinitionPreview {
  return {
    valid: true, errors: [], warnings: [], text: `name: ${name}\nbackend: llama-cpp\ncontext_size: 4096\n`, form: { ...FORM, context_size: 4096 },
    revision_changes: true, replicas: [{ node_id: "n1", node_name: "n1", replica_index: 0 }], fit: null, diff: "--- 3\n+++ new\n@@ -3 +3 @@\n-context_size: 8192\n+context_size: 4096\n", ...overrides,
  };
}

type Sent = readonly [method: string, path: string, body: unknown];
type Reply = (path: string, sent: { params?: { path?: Record<string, unknown>; query?: Record<string, unknown> }; body?: unknown }, method: string) => unknown;

/** A refusal by the server. */
export class Refusal {
  constructor(
    readonly status: number,
    readonly message: string,
    readonly field = "",
  ) {}
}

/** Reads, although they have a body. */
const READS: ReadonlySet<string> = new Set(["/api/placement/fit"]);

/** Answers every request of a page by `reply`, whose undefined is an empty list; returns what was sent beside reads. */
export function answerBy(reply: Reply): Sent[] {
  const sent: Sent[] = [];
  for (const method of ["GET", "POST", "PUT", "DELETE"] as const) {
    vi.spyOn(client, method).mockImplementation(((path: string, init: Parameters<Reply>[1] = {}) => {
      if (method !== "GET" && !READS.has(path)) sent.push([method, path, init.body]);
      const answer = reply(path, init, method);
      if (answer instanceof Refusal) return Promise.resolve({ error: { error: { message: answer.message, field: answer.field } }, response: new Response(null, { status: answer.status }) });
      return Promise.resolve({ data: answer ?? [], response: new Response() });
    }) as never);
  }
  return sent;
}
