// Announcements for assistive tech: outcomes, never progress. One polite region for the whole page.
import { useSyncExternalStore, type ReactNode } from "react";

let announced = "";
const listeners = new Set<() => void>();

/** Says `text` once. */
export function announce(text: string): void {
  // The same words twice would not be read again.
  announced = text === announced ? `${text}\u00a0` : text;
  for (const listener of listeners) listener();
}

export function Announcer(): ReactNode {
  const text = useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => announced,
  );
  return (
    <div className="visually-hidden" role="status" aria-live="polite" data-testid="announcer">
      {text}
    </div>
  );
}
