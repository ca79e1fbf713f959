import { afterEach, describe, expect, it, vi } from "vitest";
import { ApiError, whenSignedOut } from "../api/client";
import { ask, pieces, StillLoading, type Piece } from "./ask";
import { bodyOf, DONE, ended, event, refused, said, serve, whole } from "./fixtures";

afterEach(() => vi.unstubAllGlobals());

async function read(parts: readonly (string | Uint8Array)[]): Promise<Piece[]> {
  const found: Piece[] = [];
  for await (const piece of pieces(bodyOf(parts), new Headers())) found.push(piece);
  return found;
}

function textIn(found: readonly Piece[]): string {
  return found.map((piece) => piece.text).join("");
}

const REQUEST = { model: "m", messages: [] };
const signal = new AbortController().signal;

describe("a stream (UI-10.3)", () => {
  const whole_ = new TextEncoder().encode(`: working\n\n${said("Grüße, 世界 ")}${said("🙂\n")}${ended("stop")}${DONE}`);

  it("reads the same wherever its bytes are divided", async () => {
    for (let at = 0; at <= whole_.length; at += 1) {
      const found = await read([whole_.slice(0, at), whole_.slice(at)]);
      expect(textIn(found)).toBe("Grüße, 世界 🙂\n");
      expect(found.at(-1)?.usage?.completion_tokens).toBe(4);
    }
    expect(textIn(await read(Array.from(whole_, (byte) => Uint8Array.of(byte))))).toBe("Grüße, 世界 🙂\n");
  });

  it("has reasoning, tool calls and why it ended", async () => {
    const call = [{ index: 0, function: { name: "f", arguments: "{}" } }];
    const found = await read([event({ choices: [{ delta: { reasoning_content: "hm" } }] }), event({ choices: [{ delta: { tool_calls: call } }] }), ended("tool_calls"), DONE]);
    expect([found[0]?.reasoning, found[1]?.tools, found[2]?.finish]).toEqual(["hm", call, "tool_calls"]);
  });

  it("fails in the words of its error event, after what was said", async () => {
    const found: Piece[] = [];
    const reading = (async () => {
      const body = bodyOf([said("half"), event({ error: { message: "the engine died", type: "server_error", code: "unavailable" } }), DONE]);
      for await (const piece of pieces(body, new Headers({ "X-Request-Id": "r1" }))) found.push(piece);
    })();
    await expect(reading).rejects.toMatchObject({ message: "the engine died", code: "unavailable", requestId: "r1" });
    expect(textIn(found)).toBe("half");
  });

  it("that breaks off is no whole answer", async () => {
    await expect(read([said("half")])).rejects.toThrow("The connection ended before the answer did.");
    const broken = new ReadableStream<Uint8Array>({ pull: (controller) => controller.error(new TypeError("network error")) });
    await expect(pieces(broken, new Headers()).next()).rejects.toThrow("The connection broke");
  });

  it("has the engine stop when no one reads it any more", async () => {
    let left = false;
    const body = new ReadableStream<Uint8Array>({ start: (controller) => controller.enqueue(new TextEncoder().encode(said("a"))), cancel: () => void (left = true) });
    for await (const piece of pieces(body, new Headers())) {
      expect(piece.text).toBe("a");
      break;
    }
    expect(left).toBe(true);
  });
});

describe("a request (UI-10.3, UI-10.11)", () => {
  it("asks for a stream with its figures, and carries the token of the session", async () => {
    document.cookie = "csrftoken=t0ken";
    const sent = serve(whole(said("hi")));
    await ask({ ...REQUEST, seed: 4 }, signal);
    expect(sent[0]?.path).toBe("/v1/chat/completions");
    expect(sent[0]?.body).toEqual({ ...REQUEST, seed: 4, stream: true, stream_options: { include_usage: true } });
    expect(sent[0]?.headers["X-CSRFToken"]).toBe("t0ken");
  });

  it("learns that the model is on its way (E68)", async () => {
    const loading = { model: "m", state: "staging", progress: 40, bytes_sent: 4, total_bytes: 10, file_index: 0, total_files: 0, eta_seconds: 9 };
    serve(refused(503, { message: "still", type: "model_loading", code: "model_loading" }, { loading }));
    const failure = await ask(REQUEST, signal).catch((error: unknown) => error);
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
    await expect(ask(REQUEST, signal)).rejects.toMatchObject({ status: 400, field: "seed", message: "seed: too large" });
    await expect(ask(REQUEST, signal)).rejects.toMatchObject({ status: 503, retryAfter: 9 });
    const told = vi.fn();
    const stop = whenSignedOut(told);
    await expect(ask(REQUEST, signal)).rejects.toBeInstanceOf(ApiError);
    expect(told).toHaveBeenCalledOnce();
    stop();
    await expect(ask(REQUEST, signal)).rejects.toThrow("The server is unreachable.");
    await expect(ask(REQUEST, signal)).rejects.toMatchObject({ status: 502 });
  });
});
