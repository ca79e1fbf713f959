// Work that runs and of which nothing has been heard for a while: a spinner alone would say that all is well. Pure.
import type { Operation } from "../live/messages";

/** When something was last heard of running work, and when it is given up as unanswered; "" or absent if not known. */
export interface ProgressTimes {
  lastProgressAt?: string;
  timeLimitAt?: string;
}

/** Seconds without progress after which a notice is shown. */
export const SILENT_AFTER = 60;

const HOUR = 60;

function minutes(seconds: number): string {
  const wholeMinutes = Math.floor(seconds / 60);
  return wholeMinutes < HOUR ? `${wholeMinutes} min` : `${Math.floor(wholeMinutes / HOUR)} h ${wholeMinutes % HOUR} min`;
}

/** "15:27" in this browser's zone. */
export function timeOfDay(at: number): string {
  return new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" }).format(at);
}

/** "No news for 2 min, limit at 15:27"; "" while there is news, or if nothing is known of it. `now` in ms. */
export function silence({ lastProgressAt = "", timeLimitAt = "" }: ProgressTimes, now: number): string {
  const seconds = (now - Date.parse(lastProgressAt)) / 1000;
  if (!(seconds >= SILENT_AFTER)) return "";
  const limit = Date.parse(timeLimitAt);
  return `No update for ${minutes(seconds)}${limit > now ? `, limit at ${timeOfDay(limit)}` : ""}`;
}

/** The latest news of several operations: while one moves, all of them are not silent. */
export function progressTimes(operations: readonly Operation[]): ProgressTimes {
  const running = operations.filter((operation) => operation.status === "processing");
  const latest = (times: (string | undefined)[]) => times.reduce<string>((last, time = "") => (Date.parse(time) > Date.parse(last) || last === "" ? time : last), "");
  return { lastProgressAt: latest(running.map((operation) => operation.lastProgressAt)), timeLimitAt: latest(running.map((operation) => operation.timeLimitAt)) };
}
