// The conversation of this tab: what was said, what is being answered, what is typed. It is in this tab's memory and
// nowhere else; another person begins with an empty one. What comes is taken in once a frame.
import { useSyncExternalStore } from "react";
import { ApiError } from "../api/client";
import { Listeners } from "../lib/listeners";
import { NextFrame } from "../lib/next-frame";
import type { LiveStore } from "../live/store";
import { whenOver } from "../shell/session";
import { announce } from "../ui/announce";
import { newAnswer, extended, isOpen, messagesOf, type Answer, type Turn } from "./answer";
import { startStream, StillLoading, type Piece } from "./stream";
import { textOf } from "./blocks";
import { loadedOf, delay, untilLoaded } from "./loads";
import { requestOf, UNSET, type Settings } from "./settings";

export interface Chat {
  model: string;
  settings: Settings;
  turns: readonly Turn[];
  draft: string;
  /** True if the draft replaces the last question. */
  editing: boolean;
}

const EMPTY: Chat = { model: "", settings: UNSET, turns: [], draft: "", editing: false };

/** Longest wait before an attempt that comes too early, in ms. */
const LONGEST_REST_MS = 30_000;

export class Conversation {
  private chat = EMPTY;
  private readonly changes = new Listeners();
  private readonly came: Piece[] = [];
  private readonly frame = new NextFrame(() => this.takeIn());
  private resting = false;
  private control = new AbortController();
  private lastId = 0;
  /** What was in the field when the edit of a question began. */
  private draftBefore = "";
  /** Earliest time of a retry, in ms of this page. */
  private notBefore = 0;

  constructor(private readonly store: LiveStore) {}

  readonly read = (): Chat => this.chat;

  readonly subscribe = this.changes.subscribe;

  /** Changes what is typed or chosen. */
  set(change: Partial<Pick<Chat, "model" | "settings" | "draft">>): void {
    this.change(change);
  }

  get busy(): boolean {
    const last = this.chat.turns.at(-1);
    return last !== undefined && isOpen(last.answer);
  }

  /** Asks what is typed. */
  send(): void {
    const { draft, model, turns, editing } = this.chat;
    if (this.busy || draft.trim() === "" || model === "") return;
    this.lastId += 1;
    const previousTurns = editing ? turns.slice(0, -1) : turns;
    // Empties the field, or puts back what was in it before an edit.
    this.leaveEdit();
    this.begin(previousTurns, { id: this.lastId, question: draft });
  }

  /** Asks the last question again. */
  retry(): void {
    const last = this.chat.turns.at(-1);
    if (last === undefined || this.busy || this.chat.model === "") return;
    this.begin(this.chat.turns.slice(0, -1), last);
  }

  /** Puts the last question into the field; what is sent next replaces it. */
  edit(): void {
    const last = this.chat.turns.at(-1);
    if (last === undefined || this.busy || this.chat.editing) return;
    this.draftBefore = this.chat.draft;
    this.change({ draft: last.question, editing: true });
  }

  /** Puts back what was in the field before the edit. */
  leaveEdit(): void {
    this.change({ draft: this.draftBefore, editing: false });
    this.draftBefore = "";
  }

  readonly stop = (): void => this.control.abort();

  /** Clears the messages; model and settings stay. */
  clear(): void {
    this.stop();
    this.draftBefore = "";
    this.change({ turns: [], draft: "", editing: false });
  }

  private begin(previous: readonly Turn[], { id, question }: Pick<Turn, "id" | "question">): void {
    const { model, settings } = this.chat;
    const request = requestOf(model, settings, [...messagesOf(previous), { role: "user", content: question }]);
    this.came.length = 0;
    this.change({ turns: [...previous, { id, question, answer: newAnswer(model) }] });
    this.control = new AbortController();
    void this.run(id, request, this.control.signal);
  }

  private async run(id: number, request: Parameters<typeof startStream>[0], signal: AbortSignal): Promise<void> {
    try {
      const early = Math.min(this.notBefore - performance.now(), LONGEST_REST_MS);
      if (early > 0) await delay(early, signal);
      while (!(await this.answered(id, request, signal))) await untilLoaded(this.store, request.model, signal);
      this.end(id, { state: "done" });
    } catch (error) {
      const stopped = signal.aborted;
      this.end(id, stopped ? { state: "stopped" } : { state: "failed", error: error instanceof Error ? error : new Error(String(error)) });
      if (error instanceof ApiError && !stopped) this.notBefore = performance.now() + 1000 * error.retryAfter;
    }
  }

  /** True if the request was answered; it was not if the model is still being loaded. */
  private async answered(id: number, request: Parameters<typeof startStream>[0], signal: AbortSignal): Promise<boolean> {
    const live = this.store.read();
    // Without the feed's nodes it is unknown, and the answer may say that the model is still being loaded.
    this.answer(id, { sentAt: performance.now(), cold: live.nodesCursor !== null && loadedOf(live, request.model) === 0 });
    try {
      const { node, pieces } = await startStream(request, signal);
      this.answer(id, { node, loading: null });
      for await (const piece of pieces) {
        if (signal.aborted) throw new DOMException("stopped", "AbortError");
        this.came.push(piece);
        if (!this.resting) this.frame.request();
      }
      return true;
    } catch (error) {
      if (!(error instanceof StillLoading)) throw error;
      this.answer(id, { loading: error.loading });
      return false;
    }
  }

  private takeIn(): void {
    const last = this.chat.turns.at(-1);
    const came = this.came.splice(0);
    if (last === undefined || !isOpen(last.answer) || came.length === 0) return;
    this.pauseDrawing();
    this.answer(last.id, extended(last.answer, came));
  }

  /** A long list or table is drawn whole for each token of it: two thirds of the time are left for everything else. */
  private pauseDrawing(): void {
    const began = performance.now();
    this.resting = true;
    const end = () => {
      this.resting = false;
      if (this.came.length > 0) this.frame.request();
    };
    // This drawing ends before the next task.
    setTimeout(() => setTimeout(end, 2 * (performance.now() - began)));
  }

  private end(id: number, outcome: Partial<Answer>): void {
    this.frame.now();
    const last = this.chat.turns.at(-1);
    if (last?.id !== id || !isOpen(last.answer)) return;
    this.answer(id, { ...outcome, loading: null });
    announce(errorText(outcome, textOf(last.answer.blocks), last.answer.model));
  }

  /** Changes the answer of this turn, which may have been cleared meanwhile. */
  private answer(id: number, change: Partial<Answer>): void {
    const { turns } = this.chat;
    const last = turns.at(-1);
    if (last?.id === id) this.change({ turns: [...turns.slice(0, -1), { ...last, answer: { ...last.answer, ...change } }] });
  }

  private change(target: Partial<Chat>): void {
    this.chat = { ...this.chat, ...target };
    this.changes.notify();
  }
}

/** Whole answers are announced, not their tokens. */
function errorText({ state }: Partial<Answer>, text: string, model: string): string {
  if (state === "failed") return "The answer failed.";
  return `${state === "stopped" ? "Stopped. " : ""}${model}: ${text === "" ? "no text" : text}`;
}

let cached: { user: string; conversation: Conversation; forget: () => void } | null = null;

/** The conversation of this person, which outlives the page; that of another one is forgotten. Its answer stops with the session. */
export function conversationOf(user: string, store: LiveStore): Conversation {
  if (cached?.user !== user) {
    cached?.conversation.clear();
    cached?.forget();
    const conversation = new Conversation(store);
    cached = { user, conversation, forget: whenOver(conversation.stop) };
  }
  return cached.conversation;
}

export function useChat(conversation: Conversation): Chat {
  return useSyncExternalStore(conversation.subscribe, conversation.read);
}
