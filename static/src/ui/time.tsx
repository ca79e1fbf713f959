// A time: how long ago by the server's clock, the exact moment on hover and for assistive tech.
import type { ReactNode } from "react";
import { ago, exact, span } from "../lib/format";
import { useNow } from "../live/hooks";
import { Tip } from "./tip";

const NEVER = "0001-01-01T00:00:00Z";

interface AgoProps {
  at: string | null | undefined;
  intervalMs?: number;
  now?: string;
}

/** "3m ago", or "in 3m" for a time to come; `now` replaces "just now" and, for something that is due, the past. */
export function Ago({ at, intervalMs = 5000, now }: AgoProps): ReactNode {
  if (at === null || at === undefined || at === "" || at === NEVER) return <span className="muted">never</span>;
  const time = Date.parse(at);
  // A worker may have written anything there.
  if (Number.isNaN(time)) return <bdi className="muted">{at}</bdi>;
  return (
    <Tip text={exact(at)}>
      <time dateTime={at}>
        {/* A new time reads the clock again: the last reading may be older, and the time would seem to lie ahead. */}
        <Distance key={at} time={time} intervalMs={intervalMs} nowWord={now} />
      </time>
    </Tip>
  );
}

function Distance({ time, intervalMs, nowWord }: { time: number; intervalMs: number; nowWord: string | undefined }): string {
  const seconds = (useNow(intervalMs) - time) / 1000;
  return seconds < -1 ? `in ${span(-seconds)}` : (nowWord ?? ago(seconds));
}
