// The small parts that the strip, its list and the cards share: glyph, figures, what is waited for.
import type { ReactNode } from "react";
import { bytes, exact, formatTimeLeft, rate, span } from "../lib/format";
import type { Operation } from "../live/messages";
import { useNow } from "../live/hooks";
import { Icon, type IconName } from "../ui/icons";
import type { Pace } from "./pace";
import { silence, type ProgressTimes } from "./silence";
import type { State } from "./words";

const GLYPHS: Partial<Record<State, IconName>> = { failed: "warning", completed: "done", cancelled: "close" };

/** Turns while it runs, stands while it waits. */
export function WorkGlyph({ state }: { state: State }): ReactNode {
  const icon = GLYPHS[state];
  return (
    <span className={`work-glyph ${state}`} aria-hidden="true">
      {icon !== undefined ? <Icon name={icon} /> : <span className={state === "running" || state === "overdue" ? "spinner" : "work-dot"} />}
    </span>
  );
}

/** "1.2 GiB / 4 GiB · 30 MiB/s · 2 min left"; what is not known is left out. */
export function figures(current: number, total: number, pace: Pace | undefined): string {
  const parts: string[] = [];
  if (current > 0) parts.push(total > 0 ? `${bytes(current)} / ${bytes(total)}` : bytes(current));
  if (pace !== undefined && pace.rate !== null && pace.rate > 0) parts.push(rate(pace.rate));
  if (pace !== undefined && pace.secondsLeft !== null) parts.push(`${formatTimeLeft(pace.secondsLeft)} left`);
  return parts.join(" · ");
}

/** "retrying in 12s, gives up in 23h", while that is still to come; the exact time on hover. */
export function NextCheck({ operation }: { operation: Pick<Operation, "nextLookAt" | "givesUpAt"> }): ReactNode {
  const now = useNow(1000);
  const seconds = (Date.parse(operation.nextLookAt) - now) / 1000;
  if (!(seconds >= 1)) return null;
  const end = operation.givesUpAt === undefined ? null : (Date.parse(operation.givesUpAt) - now) / 1000;
  return (
    <span className="next-look" title={exact(operation.nextLookAt)}>
      retrying in {span(seconds)}
      {end !== null && end >= 1 && `, gives up in ${span(end)}`}
    </span>
  );
}

/** "No news for 2 min, limit at 15:27" of work that runs in silence; where it stands turns amber (`operations.css`). */
export function SilenceNotice({ of }: { of: ProgressTimes }): ReactNode {
  const now = useNow(5000);
  const text = silence(of, now);
  return text === "" ? null : <span className="no-news">{text}</span>;
}

/** The person's place on the page. */
export function From({ entry }: { entry: { address: string } }): ReactNode {
  if (entry.address === "") return "at the command line";
  return (
    <>
      from <bdi>{entry.address}</bdi>
    </>
  );
}
