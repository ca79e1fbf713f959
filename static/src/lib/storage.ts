// What a person chose, kept in this browser. A private window may refuse to keep anything, or to be asked: then a
// choice lasts as long as the page.
const session = new Map<string, string>();

/** What is kept under `key`, null for nothing. */
export function recall(key: string): string | null {
  try {
    return window.localStorage.getItem(key) ?? session.get(key) ?? null;
  } catch {
    return session.get(key) ?? null;
  }
}

/** Keeps `value` under `key`; null forgets it. */
export function keep(key: string, value: string | null): void {
  if (value === null) session.delete(key);
  else session.set(key, value);
  try {
    if (value === null) window.localStorage.removeItem(key);
    else window.localStorage.setItem(key, value);
  } catch {
    // It is kept for this page at least.
  }
}
