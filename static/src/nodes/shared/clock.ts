// One clock for all ages in lists: it ticks once a second while anything listens, and only the ages are drawn
// again, never their rows.
import { useSyncExternalStore } from "react";
import { useLive } from "../../live/hooks";

const TICK_MS = 1000;

let now = Date.now();
let timer: ReturnType<typeof setInterval> | undefined;
const listeners = new Set<() => void>();

function tick(): void {
  now = Date.now();
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  if (listeners.size === 0) {
    now = Date.now();
    timer = setInterval(tick, TICK_MS);
  }
  listeners.add(listener);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) clearInterval(timer);
  };
}

/** The server's time as `read` makes something of it; drawn again only when that changes. */
export function useClock<Value extends string | number | boolean>(read: (now: number) => Value): Value {
  const skew = useLive((state) => state.skew);
  return useSyncExternalStore(subscribe, () => read(now + skew));
}
