import { afterEach, expect, it, vi } from "vitest";
import { advice, ApiError, call, client } from "./client";

afterEach(() => void vi.unstubAllGlobals());

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
