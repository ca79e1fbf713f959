import { afterEach, describe, expect, it, vi } from "vitest";
import { ApiError, whenSignedOut } from "../api/client";
import { startStream, pieces, StillLoading, type Piece } from "./stream";
import { bodyOf, DONE, ended, event, refused, contentEvent, serve, fullResponse } from "./fixtures";

afterEach(() => vi.unstubAllGlobals());

async function read(parts: readonly (string | Uint8Array)[]): Promise<Piece[]> {
  const result: Piece[] = [];
  for await (const piece of pieces(bodyOf(parts), new Headers())) result.push(piece);
  return result;
}

function textIn(result: readonly Piece[]): string {
  return result.map((piece) => piece.text).join("");
}

const REQUEST = { model: "m", messages: [] };
const signal = new AbortController().signal;

describe("a stream (UI-10.3)", () => {
  const encoded = new TextEncoder().encode(`: working\n\n${contentEvent("Grüße, 世界 ")}${contentEvent("🙂\n")}${ended("stop")}${DONE}`);

  it("reads the same wherever its bytes are divided", async () => {
    for (let at = 0; at <= encoded.length; at += 1) {
      const result = await read([encoded.slice(0, at), encoded.slice(at)]);
      expect(textIn(result)).toBe("Grüße, 世界 🙂\n");
      expect(result.at(-1)?.usage?.completion_tokens).toBe(4);
    }
    expect(textIn(await read(Array.from(encoded, (byte) => Uint8Array.of(byte))))).toBe("Grüße, 世界 🙂\n");
  });

  it("has reasoning, tool calls and why it ended", async () => {
    const call = [{ index: 0, function: { name: "f", arguments: "{}" } }];
    const result = await read([event({ choices: [{ delta: { reasoning_content: "hm" } }] }), event({ choices: [{ delta: { tool_calls: call } }] }), ended("tool_calls"), DONE]);
    expect([result[0]?.reasoning, result[1]?.tools, result[2]?.finish]).toEqual(["hm", call, "tool_calls"]);
  });

  it("fails in the words of its error event, after what was said", async () => {
    const result: Piece[] = [];
    const reading = (async () => {
      const body = bodyOf([contentEvent("half"), event({ error: { message: "the engine died", type: "server_error", code: "unavailable" } }), DONE]);
      for await (const piece of pieces(body, new Headers({ "X-Request-Id": "r1" }))) result.push(piece);
    })();
    await expect(reading).rejects.toMatchObject({ message: "the engine died", code: "unavailable", requestId: "r1" });
    expect(textIn(result)).toBe("half");
  });

  it("that breaks off is no whole answer", async () => {
    await expect(read([contentEvent("half")])).rejects.toThrow("The connection ended before the answer was complete.");
    const broken = new ReadableStream<Uint8Array>({ pull: (controller) => controller.error(new TypeError("network error")) });
    await expect(pieces(broken, new Headers()).next()).rejects.toThrow("The connection broke");
  });

  it("has the engine stop when no one reads it any more", async () => {
    let hasLeft = false;
    const body = new ReadableStream<Uint8Array>({ start: (controller) => controller.enqueue(new TextEncoder().encode(contentEvent("a"))), cancel: () => void (hasLeft = true) });
    for await (const piece of pieces(body, new Headers())) {
      expect(piece.text).toBe("a");
      break;
    }
    expect(hasLeft).toBe(true);
  });
});

describe("a request (UI-10.3, UI-10.11)", () => {
  it("asks for a stream with its figures, and carries the token of the session", async () => {
    document.cookie = "csrftoken=t0ken";
    const sent = serve(fullResponse(contentEvent("hi")));
    await startStream({ ...REQUEST, seed: 4 }, signal);
    expect(sent[0]?.path).toBe("/v1/chat/completions");
    expect(sent[0]?.body).toEqual({ ...REQUEST, seed: 4, stream: true, stream_options: { include_usage: true } });
    expect(sent[0]?.headers["X-CSRFToken"]).toBe("t0ken");
  });

  it("learns that the model is on its way (E68)", async () => {
    const loading = { model: "m", state: "staging", progress: 40, bytes_sent: 4, total_bytes: 10, file_index: 0, total_files: 0, eta_seconds: 9 };
    serve(refused(503, { message: "still", type: "model_loading", code: "model_loading" }, { loading }));
    const failure = await startStream(REQUEST, signal).catch((error: unknown) => error);
    expect(failure).toBeInstanceOf(StillLoading);
    expect((failure as StillLoading).loading).toEqual(loading);
  });

  it("is refused in the server's words, and a lost session is told", async () => {
    serve(
      refused(400, { message: "seed: too large", type: "invalid_request_error", param: "seed", code: "invalid_request" }),
      refused(503, { message: "loading model m failed: no room", type: "server_error", code: "load_failed" }, {}, { "Retry-After": "9" }),
      refused(401, { message: "sign-in required", code: "unauthorized" }),
      new TypeError("network"),
      new Response("<html>", { status: 502 }),
    );
    await expect(startStream(REQUEST, signal)).rejects.toMatchObject({ status: 400, field: "seed", message: "seed: too large" });
    await expect(startStream(REQUEST, signal)).rejects.toMatchObject({ status: 503, retryAfter: 9 });
    const listener = vi.fn();
    const stop = whenSignedOut(listener);
    await expect(startStream(REQUEST, signal)).rejects.toBeInstanceOf(ApiError);
    expect(listener).toHaveBeenCalledOnce();
    stop();
    await expect(startStream(REQUEST, signal)).rejects.toThrow("The server is unreachable.");
    await expect(startStream(REQUEST, signal)).rejects.toMatchObject({ status: 502 });
  });
});
