// A time: how long ago by the server's clock, the exact moment on hover and for assistive tech.
import type { ReactNode } from "react";
import { ago, exact, span } from "../lib/format";
import { useNow } from "../live/hooks";
import { Tip } from "./tip";

const NEVER = "0001-01-01T00:00:00Z";

/** "3m ago", or "in 3m" for a time to come; `now` replaces "just now" and, for something that is due, the past. */
export function Ago({ at, intervalMs = 5000, now: nowWord }: { at: string | null | undefined; intervalMs?: number; now?: string }): ReactNode {
  const now = useNow(intervalMs);
  if (at === null || at === undefined || at === "" || at === NEVER) return <span className="muted">never</span>;
  const seconds = (now - Date.parse(at)) / 1000;
  // A worker may have written anything there.
  if (Number.isNaN(seconds)) return <bdi className="muted">{at}</bdi>;
  const text = seconds < -1 ? `in ${span(-seconds)}` : (nowWord ?? ago(seconds));
  return (
    <Tip text={exact(at)}>
      <time dateTime={at}>{text}</time>
    </Tip>
  );
}
