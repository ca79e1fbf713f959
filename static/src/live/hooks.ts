// Hooks that read the live state: a component names the part it needs and is drawn again when that part changes.
import { createContext, useContext, useEffect, useRef, useState, useSyncExternalStore } from "react";
import { LiveStore, type LiveState } from "./store";

export const LiveContext = createContext(new LiveStore());

/** A part of the live state. `pick` must answer the same object for the same part (pick a field, do not build). */
export function useLive<Part>(pick: (state: LiveState) => Part): Part {
  const store = useContext(LiveContext);
  return useSyncExternalStore(store.subscribe, () => pick(store.read()));
}

/** The server's time in ms, moving on every `everyMs`. */
export function useNow(everyMs = 1000): number {
  const skew = useLive((state) => state.skew);
  const [now, setNow] = useState(() => Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now + skew;
}

/** Calls `react` when `value` has changed, with the value before; not for the first one. */
export function useChange<Value>(value: Value, react: (previous: Value) => void): void {
  const previous = useRef(value);
  useEffect(() => {
    if (Object.is(previous.current, value)) return;
    const last = previous.current;
    previous.current = value;
    react(last);
  });
}
