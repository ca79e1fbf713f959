// Light or dark: the system's, unless a person has chosen; the choice stays in this browser.
import { useSyncExternalStore } from "react";
import { Listeners } from "../lib/listeners";
import { keep, recall } from "../lib/storage";

const KEY = "theme";
const DARK = "(prefers-color-scheme: dark)";
const changes = new Listeners();

export type Theme = "light" | "dark" | "system";

export function chosen(): Theme {
  const storedTheme = recall(KEY);
  return storedTheme === "light" || storedTheme === "dark" ? storedTheme : "system";
}

export function choose(theme: Theme): void {
  keep(KEY, theme === "system" ? null : theme);
  show();
}

function show(): void {
  const theme = chosen();
  const isDark = theme === "dark" || (theme === "system" && window.matchMedia(DARK).matches);
  document.documentElement.dataset["theme"] = isDark ? "dark" : "light";
  changes.notify();
}

export function startTheme(): void {
  show();
  window.matchMedia(DARK).addEventListener("change", show);
}

/** The chosen theme, live. */
export function useTheme(): Theme {
  return useSyncExternalStore(changes.subscribe, chosen);
}

/** True if the page is dark now: for what is drawn on a canvas. */
export function useDark(): boolean {
  return useSyncExternalStore(changes.subscribe, () => document.documentElement.dataset["theme"] === "dark");
}
