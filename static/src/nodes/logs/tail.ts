// One log, live: a websocket that is opened again after a pause, and a buffer that changes once a frame. What the
// socket cannot say, because it was refused before it was open, one request over REST does.
import { ApiError, call, client } from "../../api/client";
import type { components } from "../../api/schema";
import { Listeners } from "../../lib/listeners";
import { NextFrame } from "../../lib/next-frame";
import { appended, MAX_LINES, rejoined, type Line } from "./lines";

type Message = components["schemas"]["LogMessage"];
type LogLine = components["schemas"]["LogLine"];

const AGAIN_MS = 3_000;
const SIGNED_OUT = 4401;
const FORBIDDEN = 4403;

export interface TailState {
  lines: readonly Line[];
  /** connecting: nothing is known yet; live: every new line comes; lost: it is tried again. */
  connection: "connecting" | "live" | "lost";
  /** Why it is lost; null while it is not, or if only the connection broke. */
  problem: Error | null;
}

/** The address of a log's socket. */
export function address(place: Pick<Location, "protocol" | "host">, node: string, of: string): string {
  const scheme = place.protocol === "https:" ? "wss" : "ws";
  return `${scheme}://${place.host}/ws/nodes/${encodeURIComponent(node)}/backend-logs/${encodeURIComponent(of)}`;
}

function isLine(value: unknown): value is LogLine {
  const line = value as Partial<LogLine> | null;
  return typeof line === "object" && line !== null && typeof line.text === "string" && typeof line.timestamp === "string";
}

/** A message of the worker's, which is no more to be trusted than the worker; null for what is none. */
export function read(data: unknown): Message | null {
  if (typeof data !== "string") return null;
  try {
    const message = JSON.parse(data) as Partial<Message> | null;
    if (message?.type === "line" && isLine(message.line)) return message as Message;
    if (message?.type === "initial" && Array.isArray(message.lines) && message.lines.every(isLine)) return message as Message;
  } catch {
    // No JSON is no message.
  }
  return null;
}

export class Tail {
  private state: TailState = { lines: [], connection: "connecting", problem: null };
  private readonly changes = new Listeners();
  private socket: WebSocket | null = null;
  private retryTimer: ReturnType<typeof setTimeout> | undefined;
  private readonly frame = new NextFrame(() => this.takeIn());
  private waiting: LogLine[] = [];
  private greeted = false;
  private stopped = true;

  constructor(
    private readonly node: string,
    private readonly of: string,
  ) {}

  readonly subscribe = this.changes.subscribe;

  readonly read = (): TailState => this.state;

  /** Connects and stays connected until `stop`. */
  start(): void {
    if (!this.stopped) return;
    this.stopped = false;
    this.connect();
  }

  stop(): void {
    this.stopped = true;
    clearTimeout(this.retryTimer);
    this.frame.now();
    this.socket?.close();
    this.socket = null;
  }

  /** Connects again at once; the open socket may be dead, since a cut cable closes nothing. */
  readonly now = (): void => {
    if (this.stopped) return;
    const former = this.socket;
    if (former !== null) this.ended(0, "");
    former?.close();
    this.connect();
  };

  /** Connects again when the feed is live again, unless that was its first connection and the log is not lost. */
  feedIsLive(isFirst: boolean): void {
    if (!isFirst || this.state.connection === "lost") this.now();
  }

  /** Forgets the lines that there are. */
  readonly clear = (): void => {
    this.frame.now();
    this.set({ lines: [] });
  };

  private connect(): void {
    clearTimeout(this.retryTimer);
    const socket = new WebSocket(address(window.location, this.node, this.of));
    this.socket = socket;
    this.greeted = false;
    socket.onmessage = (event: MessageEvent<unknown>) => {
      const message = read(event.data);
      if (this.socket !== socket || message === null) return;
      if (message.type === "line") this.push(message.line);
      else this.greet(message.lines);
    };
    socket.onclose = (event) => {
      if (this.socket === socket) this.ended(event.code, event.reason);
    };
  }

  private greet(lines: readonly LogLine[]): void {
    this.greeted = true;
    this.set({ lines: rejoined(this.state.lines, lines), connection: "live", problem: null });
  }

  private push(line: LogLine): void {
    this.waiting.push(line);
    if (this.waiting.length >= MAX_LINES) this.frame.now();
    else this.frame.request();
  }

  private takeIn(): void {
    const lines = this.waiting;
    this.waiting = [];
    if (lines.length > 0) this.set({ lines: appended(this.state.lines, lines) });
  }

  private ended(code: number, reason: string): void {
    this.frame.now();
    this.socket = null;
    if (this.stopped) return;
    this.retryTimer = setTimeout(() => this.connect(), AGAIN_MS);
    if (code === SIGNED_OUT || code === FORBIDDEN) clearTimeout(this.retryTimer);
    const closeReason = code === FORBIDDEN ? "Only administrators can read logs." : reason;
    this.set({ connection: "lost", problem: closeReason === "" ? this.state.problem : new Error(closeReason) });
    if (!this.greeted && closeReason === "") void this.fetchTicket();
  }

  /** The lines over REST, or why there are none. */
  private async fetchTicket(): Promise<void> {
    const params = { path: { node_id: this.node, model: this.of } };
    try {
      const lines = await call(client.GET("/api/nodes/{node_id}/backend-logs/{model}", { params }));
      if (!this.stopped && !this.greeted) this.set({ lines: rejoined(this.state.lines, lines), problem: null });
    } catch (error) {
      if (this.stopped || this.greeted || !(error instanceof ApiError)) return;
      // A node that is not there does not come back under this id.
      if (error.status === 404) clearTimeout(this.retryTimer);
      this.set({ problem: error });
    }
  }

  private set(change: Partial<TailState>): void {
    this.state = { ...this.state, ...change };
    this.changes.notify();
  }
}
