import { afterEach, expect, it, vi } from "vitest";
import { advice, ApiError, call, client } from "./client";

afterEach(() => void vi.unstubAllGlobals());

it("a server that takes a request and never answers is no endless waiting (UI-9.6)", async () => {
  vi.spyOn(AbortSignal, "timeout").mockReturnValue(AbortSignal.abort(new DOMException("late", "TimeoutError")));
  vi.stubGlobal("fetch", (_: Request, { signal }: RequestInit) => Promise.reject(signal?.reason as Error));
  const failure = await call(client.POST("/api/auth/logout", { baseUrl: "http://here/" })).catch((error: unknown) => error);
  expect(failure).toBeInstanceOf(ApiError);
  expect((failure as ApiError).message).toBe("The server does not answer.");
  expect(advice(failure as ApiError)).toContain("may have been done");
});
