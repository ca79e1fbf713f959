// A person's choices, stored in this browser. A private window may refuse to store or read: then a
// choice lasts as long as the page.
const session = new Map<string, string>();

/** The value under `key`, or null. */
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
