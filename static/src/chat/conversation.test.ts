import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { UNDRAWN_MS } from "../lib/next-frame";
import { model, node } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { LiveStore } from "../live/store";
import { notifySessionEnd } from "../shell/session";
import { textOf } from "./blocks";
import { Conversation, conversationOf } from "./conversation";
import { ended, Open, refused, contentEvent, serve, fullResponse } from "./fixtures";

let store: LiveStore;
let talk: Conversation;

function begin(): void {
  store = new LiveStore();
  publishState();
  talk = new Conversation(store);
  talk.set({ model: "m" });
}

beforeEach(begin);

afterEach(() => {
  talk.clear();
  vi.unstubAllGlobals();
});

function load(overrides: Partial<Operation> = {}): Operation {
  return { jobID: "j", kind: "model_load", fullName: "m", name: "m", status: "processing", seq: 1, createdAt: "2026-08-22T10:00:00Z", ...overrides } as Operation;
}

/** The feed says this. */
function publishState(operations: Operation[] = [], ...models: string[]): void {
  store.push({ type: "operations.snapshot", seq: 1, operations });
  store.push({ type: "nodes.snapshot", cursor: "e:1", nodes: [node("n1", { models: models.map((name) => model(name, 0)) })] });
}

function sendMessage(text: string): void {
  talk.set({ draft: text });
  talk.send();
}

const last = () => {
  const turn = talk.read().turns.at(-1);
  if (turn === undefined) throw new Error("nothing was said");
  return { ...turn.answer, text: textOf(turn.answer.blocks), question: turn.question };
};

async function until(state: string): Promise<void> {
  await vi.waitFor(() => expect(last().state).toBe(state));
}

const STILL = { model: "m", state: "staging", progress: 40, bytes_sent: 4, total_bytes: 10, file_index: 0, total_files: 0, eta_seconds: 9 };
const still = () => refused(503, { message: "still", type: "model_loading", code: "model_loading" }, { loading: STILL });

describe("a conversation", () => {
  it("is told whole with each question, and knows the node (UI-10.3, UI-10.6)", async () => {
    const open = new Open("n1");
    const sent = serve(open, fullResponse(contentEvent("Fine."), ended("stop")));
    sendMessage("Hello");
    expect([last().state, talk.read().draft]).toEqual(["waiting", ""]);
    open.send(contentEvent("Hi "), contentEvent("you"), ended("stop"), "data: [DONE]\n\n");
    await until("done");
    expect([last().text, last().node, last().finish]).toEqual(["Hi you", "n1", "stop"]);
    sendMessage("How are you?");
    await until("done");
    expect(sent[1]?.body.messages).toEqual([{ role: "user", content: "Hello" }, { role: "assistant", content: "Hi you" }, { role: "user", content: "How are you?" }]);
  });

  it("tells its listeners of many tokens once a frame (UI-10.5)", async () => {
    const frames: (() => void)[] = [];
    vi.stubGlobal("requestAnimationFrame", (run: () => void) => frames.push(run));
    // A busy machine must not reach the limit for a frame.
    const { setTimeout: start } = globalThis;
    vi.stubGlobal("setTimeout", (run: () => void, ms = 0) => (ms === UNDRAWN_MS ? 0 : start(run, ms)));
    const open = new Open();
    serve(open);
    sendMessage("Count");
    const listener = vi.fn();
    await vi.waitFor(() => expect(last().node).toBe(""));
    talk.subscribe(listener);
    open.send(...Array.from({ length: 500 }, (_, at) => contentEvent(`${at} `)));
    await vi.waitFor(() => expect(frames).toHaveLength(1));
    listener.mockClear();
    let drawn = 0;
    await vi.waitFor(() => {
      for (const draw of frames.splice(0)) {
        draw();
        drawn += 1;
      }
      expect(last().text).toMatch(/ 499 $/);
    });
    expect(listener).toHaveBeenCalledTimes(drawn);
    expect(drawn).toBeLessThan(50);
    expect(last().text).toMatch(/^0 1 2 .* 499 $/);
  });

  it("stops when it is told to, keeps what came and leaves the server (UI-10.7)", async () => {
    const open = new Open();
    const sent = serve(open);
    sendMessage("Talk");
    open.send(contentEvent("one "));
    await vi.waitFor(() => expect(last().text).toBe("one "));
    talk.stop();
    expect(sent[0]?.signal.aborted).toBe(true);
    await until("stopped");
    expect(last().text).toBe("one ");
  });

  it("asks the last question again, or another one in its place (UI-10.7)", async () => {
    const sent = serve(fullResponse(contentEvent("a")), fullResponse(contentEvent("b")), fullResponse(contentEvent("c")));
    sendMessage("First");
    await until("done");
    talk.retry();
    await vi.waitFor(() => expect(last().text).toBe("b"));
    await until("done");
    talk.edit();
    expect(talk.read()).toMatchObject({ draft: "First", editing: true });
    talk.leaveEdit();
    expect(talk.read()).toMatchObject({ draft: "", editing: false });
    talk.set({ draft: "A long thought" });
    talk.edit();
    talk.leaveEdit();
    expect(talk.read(), "what was typed is not lost").toMatchObject({ draft: "A long thought", editing: false });
    talk.edit();
    sendMessage("Second");
    await until("done");
    expect(talk.read().turns.map(({ question }) => question)).toEqual(["Second"]);
    expect(sent.map(({ body }) => body.messages.map(({ content }) => content))).toEqual([["First"], ["First"], ["Second"]]);
  });

  it("keeps what came before a failure, and says why (UI-10.3)", async () => {
    serve(fullResponse(contentEvent("half"), 'data: {"error": {"message": "the engine died", "code": "unavailable"}}\n\n'));
    sendMessage("Talk");
    await until("failed");
    expect([last().text, last().error?.message]).toEqual(["half", "the engine died"]);
  });

  it("forgets all of it, and takes in nothing that comes later (UI-10.7)", async () => {
    const open = new Open();
    serve(open, fullResponse(contentEvent("new")));
    sendMessage("Talk");
    open.send(contentEvent("old"));
    await vi.waitFor(() => expect(last().text).toBe("old"));
    open.send(contentEvent("older"));
    talk.clear();
    sendMessage("Again");
    await until("done");
    expect(talk.read().turns.map(({ answer }) => textOf(answer.blocks))).toEqual(["new"]);
  });

  it("is kept for the same person and dropped for another (UI-10.10)", () => {
    const mine = conversationOf("1", store);
    mine.set({ draft: "secret" });
    expect(conversationOf("1", store)).toBe(mine);
    const theirs = conversationOf("2", store);
    expect(theirs.read().draft).toBe("");
    expect(mine.read().draft).toBe("");
  });
});

it("an answer stops with the session, as the page learns of its end", async () => {
  const open = new Open();
  const sent = serve(open);
  const mine = conversationOf("3", store);
  mine.set({ model: "m", draft: "Talk" });
  mine.send();
  open.send(contentEvent("one "));
  await vi.waitFor(() => expect(mine.read().turns[0]?.answer.firstAt).not.toBeNull());
  notifySessionEnd();
  expect(sent[0]?.signal.aborted).toBe(true);
  await vi.waitFor(() => expect(mine.read().turns[0]?.answer.state).toBe("stopped"));
  // That of another person is not asked to.
  conversationOf("4", store);
  const previous = mine.read();
  notifySessionEnd();
  expect(mine.read()).toBe(previous);
});

describe("a model that is being loaded (E68, UI-10.8)", () => {
  beforeEach(() => {
    vi.useFakeTimers();
    begin();
  });
  afterEach(() => void vi.useRealTimers());

  const pass = (ms: number) => vi.advanceTimersByTimeAsync(ms);

  it("is waited for by the feed, and the question repeats by itself", async () => {
    publishState([load()]);
    await pass(300);
    const sent = serve(still(), fullResponse(contentEvent("here")));
    sendMessage("Hello");
    await pass(10);
    expect(last()).toMatchObject({ state: "waiting", loading: STILL, cold: true });
    await pass(10_000);
    expect(sent).toHaveLength(1);
    publishState([load({ status: "completed" })], "m");
    await pass(2_000);
    expect(last()).toMatchObject({ state: "done", text: "here", loading: null, cold: false });
    expect(sent).toHaveLength(2);
    expect(sent[1]?.body).toEqual(sent[0]?.body);
  });

  it("that fails says why, and the next try waits until it makes sense", async () => {
    publishState([load()]);
    await pass(300);
    const failed = refused(503, { message: "loading model m failed: no room", type: "server_error", code: "load_failed" }, {}, { "Retry-After": "9" });
    const sent = serve(still(), failed, fullResponse(contentEvent("here")));
    sendMessage("Hello");
    await pass(10);
    publishState([load({ status: "failed", error: "no room" })]);
    await pass(2_000);
    expect(last()).toMatchObject({ state: "failed", error: { message: "loading model m failed: no room" } });
    talk.retry();
    await pass(5_000);
    expect(sent).toHaveLength(2);
    await pass(5_000);
    expect(last()).toMatchObject({ state: "done", text: "here" });
  });

  it("is asked after while the feed is lost", async () => {
    publishState([load()]);
    await pass(300);
    store.lost("stale");
    const getSpy = vi.spyOn(client, "GET");
    const answer = (body: unknown, status: number) => Promise.resolve(status === 200 ? { data: body, response: new Response() } : { error: body, response: new Response(null, { status }) });
    getSpy.mockReturnValueOnce(answer(STILL, 200)).mockReturnValueOnce(answer({ error: "none" }, 404));
    const sent = serve(still(), fullResponse(contentEvent("here")));
    sendMessage("Hello");
    await pass(5_000);
    expect(last()).toMatchObject({ state: "done", text: "here" });
    expect(getSpy).toHaveBeenCalledTimes(2);
    expect(sent).toHaveLength(2);
  });

  it("can be given up", async () => {
    publishState([load()]);
    await pass(300);
    const sent = serve(still());
    sendMessage("Hello");
    await pass(10);
    talk.stop();
    await pass(5_000);
    expect(last().state).toBe("stopped");
    expect(sent).toHaveLength(1);
  });
});
