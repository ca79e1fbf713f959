// Announcements for assistive tech: outcomes, never progress. One polite region for the whole page.
import { useSyncExternalStore, type ReactNode } from "react";
import { Listeners } from "../lib/listeners";

let announced = "";
const changes = new Listeners();

/** Says `text` once. */
export function announce(text: string): void {
  // The same words twice would not be read again.
  announced = text === announced ? `${text}\u00a0` : text;
  changes.notify();
}

export function Announcer(): ReactNode {
  const text = useSyncExternalStore(changes.subscribe, () => announced);
  return (
    <div className="visually-hidden" role="status" aria-live="polite" data-testid="announcer">
      {text}
    </div>
  );
}
