import { describe, expect, it, vi } from "vitest";
import { ApiError, advice, call, explain, whenSignedOut } from "./client";

function answer(status: number, headers: Record<string, string> = {}): Response {
  return new Response(null, { status, headers });
}

describe("refusals (http-0.4)", () => {
  it("reads the flat shape with its field", () => {
    const result = explain({ error: "value must be between 1 and 10000", field: "value" }, answer(400));
    expect([result.message, result.field, result.status]).toEqual(["value must be between 1 and 10000", "value", 400]);
  });

  it("reads the nested shape with code, wait and request id", () => {
    const body = { error: { message: "too many", code: "too_many_failures" } };
    const result = explain(body, answer(429, { "Retry-After": "30", "X-Request-Id": "r1" }));
    expect([result.code, result.retryAfter, result.requestId]).toEqual(["too_many_failures", 30, "r1"]);
    expect(advice(result)).toBe("Try again in 30 s.");
  });

  it.each([502, 403, 404])("has words of its own for a bare %d", (status) => {
    expect(explain("<html>", answer(status)).message).not.toBe("");
  });
});

describe("calls", () => {
  it("answers the body of a success", async () => {
    await expect(call(Promise.resolve({ data: { a: 1 }, response: answer(200) }))).resolves.toEqual({ a: 1 });
  });

  it("tells the session about a 401 and raises it", async () => {
    const listener = vi.fn();
    const stop = whenSignedOut(listener);
    const request = call(Promise.resolve({ error: { error: "sign in" }, response: answer(401) }));
    await expect(request).rejects.toBeInstanceOf(ApiError);
    stop();
    expect(listener).toHaveBeenCalledOnce();
  });

  it("says that the server cannot be reached", async () => {
    await expect(call(Promise.reject(new TypeError("fetch failed")))).rejects.toMatchObject({ status: 0 });
  });
});
