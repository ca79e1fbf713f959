import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import { MAX_LINES } from "./lines";
import { address, read, Tail } from "./tail";

const line = (text: string) => ({ timestamp: "2026-11-21T00:00:00Z", stream: "stdout", text });

class FakeSocket {
  static created: FakeSocket[] = [];
  onmessage: ((event: { data: unknown }) => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;
  closed = false;
  constructor(readonly url: string) {
    FakeSocket.created.push(this);
  }
  close(): void {
    this.closed = true;
  }
  receive(message: unknown): void {
    this.onmessage?.({ data: typeof message === "string" ? message : JSON.stringify(message) });
  }
  ends(code: number, reason = ""): void {
    this.onclose?.({ code, reason });
  }
}

const last = (): FakeSocket => {
  const socket = FakeSocket.created.at(-1);
  if (socket === undefined) throw new Error("no socket was opened");
  return socket;
};

const texts = (tail: Tail) => tail.read().lines.map((line) => line.text);
const answer = (data: unknown, status = 200) =>
  vi.spyOn(client, "GET").mockResolvedValue((status === 200 ? { data, response: new Response() } : { error: data, response: new Response(null, { status }) }));

let tail: Tail;

beforeEach(() => {
  vi.useFakeTimers();
  FakeSocket.created = [];
  vi.stubGlobal("WebSocket", FakeSocket);
  tail = new Tail("n1", "org/m#0");
  tail.start();
});

afterEach(() => {
  tail.stop();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
  vi.useRealTimers();
});

describe("a log that is followed (UI-5.1)", () => {
  it("has the lines there are, then each new one with the next frame", () => {
    expect(address({ protocol: "https:", host: "h" }, "n 1", "org/m#0")).toBe("wss://h/ws/nodes/n%201/backend-logs/org%2Fm%230");
    expect(tail.read().connection).toBe("connecting");
    last().receive({ type: "initial", lines: [line("old")] });
    expect([texts(tail), tail.read().connection]).toEqual([["old"], "live"]);
    let changes = 0;
    tail.subscribe(() => (changes += 1));
    for (let at = 0; at < 500; at += 1) last().receive({ type: "line", line: line(String(at)) });
    expect(changes).toBe(0);
    vi.advanceTimersByTime(50);
    expect([changes, texts(tail).length]).toEqual([1, 501]);
  });

  it("is bounded in a tab that gets no frames", () => {
    vi.stubGlobal("requestAnimationFrame", () => 1);
    last().receive({ type: "initial", lines: [] });
    for (let at = 0; at < MAX_LINES * 2 + 5; at += 1) last().receive({ type: "line", line: line(String(at)) });
    expect(texts(tail).length).toBe(MAX_LINES);
  });

  it("leaves out what is no message", () => {
    for (const odd of ["", "{", "[]", "null", '{"type":"line"}', '{"type":"line","line":{"text":5}}', '{"type":"initial","lines":[{}]}']) {
      expect(read(odd)).toBe(null);
    }
    expect(read(new ArrayBuffer(2))).toBe(null);
  });
});

describe("a log that is lost (UI-5.6)", () => {
  it("comes back after three seconds, without doubles", () => {
    last().receive({ type: "initial", lines: [line("a")] });
    last().ends(1011, "node gpu-a: the worker has ended the stream");
    expect([tail.read().connection, tail.read().problem?.message]).toEqual(["lost", "node gpu-a: the worker has ended the stream"]);
    vi.advanceTimersByTime(3_000);
    expect(FakeSocket.created.length).toBe(2);
    last().receive({ type: "initial", lines: [line("a"), line("b")] });
    expect([texts(tail), tail.read().connection, tail.read().problem]).toEqual([["a", "b"], "live", null]);
  });

  it("leaves a socket that may be dead, as after a cut cable, when it is to connect at once", () => {
    const dead = last();
    dead.receive({ type: "initial", lines: [line("a")] });
    dead.receive({ type: "line", line: line("b") });
    tail.now();
    expect([FakeSocket.created.length, dead.closed, tail.read().connection]).toEqual([2, true, "lost"]);
    last().receive({ type: "initial", lines: [line("a"), line("b"), line("c")] });
    dead.receive({ type: "line", line: line("late") });
    dead.ends(1006);
    vi.advanceTimersByTime(3_000);
    expect([FakeSocket.created.length, texts(tail), tail.read().connection]).toEqual([2, ["a", "b", "c"], "live"]);
  });

  it("comes back after a new sign-in, with which the feed connects anew", () => {
    tail.feedIsLive(true);
    expect(FakeSocket.created.length).toBe(1);
    last().receive({ type: "initial", lines: [] });
    last().ends(4401);
    vi.advanceTimersByTime(60_000);
    expect(FakeSocket.created.length).toBe(1);
    tail.feedIsLive(true);
    expect(FakeSocket.created.length).toBe(2);
  });

  it("asks over REST when the socket ends before its first message and says nothing", async () => {
    answer([line("kept")]);
    last().ends(1006);
    await vi.waitFor(() => expect(texts(tail)).toEqual(["kept"]));
    expect(tail.read().connection).toBe("lost");
  });

  it("says what REST says when that fails too", async () => {
    answer({ error: { message: "node not found" } }, 404);
    last().ends(1006);
    await vi.waitFor(() => expect(tail.read().problem?.message).toBe("node not found"));
    vi.advanceTimersByTime(60_000);
    expect(FakeSocket.created.length).toBe(1);
    tail.now();
    expect(FakeSocket.created.length).toBe(2);
  });

  it("is not tried again for somebody who may not read it", () => {
    last().ends(4403);
    vi.advanceTimersByTime(60_000);
    expect([FakeSocket.created.length, tail.read().problem?.message]).toEqual([1, "Only administrators can read logs."]);
  });
});
