// The one websocket of a tab. It says where the reader stands when it connects, notices when the server has gone
// quiet, and comes back by itself: at once when the network or the tab returns, else after a growing pause.
import type { FeedMessage } from "./messages";
import type { LiveStore } from "./store";

const QUIET_MS = 12_000;
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 8_000;
const SIGNED_OUT = 4401;
const FORBIDDEN = 4403;

/** The address of the feed, from where this reader stands. */
export function address(place: Pick<Location, "protocol" | "host">, seq: number | null, cursor: string | null): string {
  const query = new URLSearchParams();
  if (seq !== null) query.set("operations", String(seq));
  if (cursor !== null) query.set("nodes", cursor);
  const scheme = place.protocol === "https:" ? "wss" : "ws";
  return `${scheme}://${place.host}/ws/feed?${query.toString()}`;
}

/** The pause before the next attempt: doubled each time, spread so that browsers do not come back together. */
export function pause(attempt: number, random: number): number {
  return Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** attempt) * (0.5 + random / 2);
}

export class FeedSocket {
  private socket: WebSocket | null = null;
  private attempt = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private quiet: ReturnType<typeof setTimeout> | undefined;
  private stopped = true;

  constructor(private readonly store: LiveStore) {}

  /** Connects and stays connected until `stop`. */
  start(): void {
    if (!this.stopped) return;
    this.stopped = false;
    window.addEventListener("online", this.now);
    document.addEventListener("visibilitychange", this.now);
    this.connect();
  }

  stop(): void {
    this.stopped = true;
    window.removeEventListener("online", this.now);
    document.removeEventListener("visibilitychange", this.now);
    clearTimeout(this.timer);
    clearTimeout(this.quiet);
    this.socket?.close();
    this.socket = null;
  }

  private readonly now = (): void => {
    if (this.stopped || this.socket !== null || document.hidden) return;
    this.attempt = 0;
    this.connect();
  };

  private connect(): void {
    clearTimeout(this.timer);
    const { operationsSeq, nodesCursor } = this.store.read();
    const socket = new WebSocket(address(window.location, operationsSeq, nodesCursor));
    this.socket = socket;
    socket.onmessage = (event: MessageEvent<string>) => {
      this.attempt = 0;
      this.expectMore();
      this.store.push(JSON.parse(event.data) as FeedMessage);
    };
    socket.onclose = (event) => {
      if (this.socket === socket) this.ended(event.code);
    };
    this.expectMore();
  }

  private expectMore(): void {
    clearTimeout(this.quiet);
    // A cut cable closes nothing: silence is the only sign.
    this.quiet = setTimeout(() => {
      const silent = this.socket;
      this.ended(0);
      silent?.close();
    }, QUIET_MS);
  }

  private ended(code: number): void {
    clearTimeout(this.quiet);
    this.socket = null;
    if (this.stopped) return;
    if (code === SIGNED_OUT || code === FORBIDDEN) {
      this.stop();
      this.store.lost(code === SIGNED_OUT ? "signed-out" : "forbidden");
      return;
    }
    this.store.lost("stale");
    this.timer = setTimeout(() => this.connect(), pause(this.attempt, Math.random()));
    this.attempt += 1;
  }
}
