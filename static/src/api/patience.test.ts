import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { renderHook, waitFor } from "@testing-library/react";
import { createElement, type ReactNode } from "react";
import { afterEach, expect, it, vi } from "vitest";
import { BLANK, usePlan } from "../capacity/plan-form";
import { importModel, useSource } from "../models/sources";
import { advice, ApiError, call, client } from "./client";

afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

it.each([
  ["POST", () => client.POST("/api/auth/logout", { baseUrl: "http://here/" }), "may have succeeded"],
  ["GET", () => client.GET("/api/auth/status", { baseUrl: "http://here/" }), "Your input is kept"],
] as const)("a server that takes a %s and never answers is no endless waiting (UI-9.6)", async (_, send, text) => {
  vi.spyOn(AbortSignal, "timeout").mockReturnValue(AbortSignal.abort(new DOMException("late", "TimeoutError")));
  vi.stubGlobal("fetch", (_: Request, { signal }: RequestInit) => Promise.reject(signal?.reason as Error));
  const failure = await call<unknown>(send()).catch((error: unknown) => error);
  expect(failure).toBeInstanceOf(ApiError);
  expect((failure as ApiError).message).toBe("The server is not responding.");
  expect(advice(failure as ApiError)).toContain(text);
});

/** As long as the server may take for an address, an import and a plan with a file. */
const SERVER_MS = 140_000;

const CALLS: readonly (readonly [path: string, call: () => unknown])[] = [
  ["/api/models/import", () => importModel({ text: "tiny", variant: "", name: "", load: false })],
  ["/api/sources/inspect", () => useSource("tiny")],
  ["/api/placement/plan", () => usePlan({ form: BLANK, file: null })],
];

it.each(CALLS)("%s has longer to answer than the server takes", async (path, use) => {
  const post = vi.spyOn(client, "POST").mockResolvedValue({ data: {}, response: new Response() });
  const limit = vi.spyOn(AbortSignal, "timeout");
  vi.stubGlobal("fetch", () => Promise.resolve(new Response()));
  const queries = new QueryClient();
  renderHook(use, { wrapper: ({ children }: { children: ReactNode }) => createElement(QueryClientProvider, { client: queries }, children) });
  await waitFor(() => expect(post).toHaveBeenCalledWith(path, expect.anything()));
  const [[, options]] = post.mock.calls as unknown as [[string, { fetch?: typeof fetch }]];
  await options.fetch?.(new Request("http://here/"));
  expect(limit.mock.calls.at(-1)?.[0]).toBeGreaterThan(SERVER_MS);
});
