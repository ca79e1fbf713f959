// The keyboard map. A page says which keys it takes while it is open (`useShortcut`); one listener hears them all.
// Single keys work only outside of fields, menus and dialogs, and can be turned off; a combination with Ctrl or Cmd
// works in fields too.
import { useEffect, useRef, useSyncExternalStore } from "react";
import { Listeners } from "../lib/listeners";
import { keep, recall } from "../lib/storage";

export interface Shortcut {
  /** `j`, `?`, `g n` (one after the other) or `mod+k` (Ctrl or Cmd). */
  keys: string;
  description: string;
  run: () => void;
}

/** The fields of a keyboard event that select a shortcut. */
export type Press = Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "altKey">;

const OFF_KEY = "single-keys";
const SEQUENCE_MS = 1000;
/** A checkbox takes the space key only. */
const FIELDS = "input:not([type='checkbox']), textarea, select, [contenteditable='true']";
const OWN_KEYS = `${FIELDS}, [role='dialog'], [role='alertdialog'], [role='menu'], [role='listbox'], [role='combobox']`;

let shortcuts: readonly Shortcut[] = [];
const changes = new Listeners();

function publish(next: readonly Shortcut[]): void {
  shortcuts = next;
  changes.notify();
}

/** The keys that work now. */
export function useShortcuts(): readonly Shortcut[] {
  return useSyncExternalStore(changes.subscribe, () => shortcuts);
}

export function singleKeysWork(): boolean {
  return recall(OFF_KEY) !== "off";
}

export function useSingleKeys(): boolean {
  return useSyncExternalStore(changes.subscribe, singleKeysWork);
}

export function setSingleKeys(work: boolean): void {
  keep(OFF_KEY, work ? null : "off");
  changes.notify();
}

/** Takes `keys` while the component is there and `enabled`; the last one that takes them gets them. */
export function useShortcut(keys: string, run: () => void, description: string, enabled = true): void {
  const latest = useRef(run);
  useEffect(() => {
    latest.current = run;
  });
  useEffect(() => {
    if (!enabled) return;
    const shortcut = { keys, description, run: () => latest.current() };
    publish([...shortcuts, shortcut]);
    return () => publish(shortcuts.filter((other) => other !== shortcut));
  }, [keys, description, enabled]);
}

/** The notation of a key press in the map; "" if no shortcut can use it. */
export function written(press: Press): string {
  if (press.altKey || press.key === "Shift") return "";
  if (press.ctrlKey || press.metaKey) return `mod+${press.key.toLowerCase()}`;
  return press.key.length === 1 ? press.key : press.key.toLowerCase();
}

/** The effect of pressing `key` after `before` ("" for nothing): a shortcut, or what a longer one now waits for. */
export function match(registered: readonly Shortcut[], previous: string, key: string): { hit: Shortcut | null; pending: string } {
  if (key === "") return { hit: null, pending: previous };
  const sequence = previous === "" ? key : `${previous} ${key}`;
  const hit = registered.findLast((shortcut) => shortcut.keys === sequence) ?? null;
  if (hit !== null) return { hit, pending: "" };
  if (registered.some((shortcut) => shortcut.keys.startsWith(`${sequence} `))) return { hit: null, pending: sequence };
  return previous === "" ? { hit: null, pending: "" } : match(registered, "", key);
}

/** True if the element has a use of its own for single keys. */
export function typing(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest(OWN_KEYS) !== null;
}

/** Hears the keys of the whole page; answers how to stop. */
export function listen(): () => void {
  let pending = "";
  let at = 0;
  const hear = (event: KeyboardEvent) => {
    if (event.defaultPrevented || event.isComposing) return;
    const key = written(event);
    const inside = event.target instanceof Element ? event.target.closest("[role='dialog'], [role='alertdialog']") : null;
    if (key.startsWith("mod+") ? inside !== null : typing(event.target) || !singleKeysWork()) return;
    const result = match(shortcuts, event.timeStamp - at < SEQUENCE_MS ? pending : "", key);
    pending = result.pending;
    at = event.timeStamp;
    if (result.hit === null) return;
    event.preventDefault();
    result.hit.run();
  };
  document.addEventListener("keydown", hear);
  return () => document.removeEventListener("keydown", hear);
}
