// Work that runs and of which nothing has been heard for a while: a spinner alone would say that all is well. Pure.
import type { Operation } from "../live/messages";

/** When something was last heard of running work, and when it is given up as unanswered; "" or absent if not known. */
export interface News {
  lastProgressAt?: string;
  timeLimitAt?: string;
}

/** Seconds without news from which it is said. */
export const SILENT_AFTER = 60;

const HOUR = 60;

function minutes(seconds: number): string {
  const whole = Math.floor(seconds / 60);
  return whole < HOUR ? `${whole} min` : `${Math.floor(whole / HOUR)} h ${whole % HOUR} min`;
}

function timeOfDay(at: number): string {
  return new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" }).format(at);
}

/** "No news for 2 min, limit at 15:27"; "" while there is news, or if nothing is known of it. `now` in ms. */
export function silence({ lastProgressAt = "", timeLimitAt = "" }: News, now: number): string {
  const seconds = (now - Date.parse(lastProgressAt)) / 1000;
  if (!(seconds >= SILENT_AFTER)) return "";
  const limit = Date.parse(timeLimitAt);
  return `No news for ${minutes(seconds)}${limit > now ? `, limit at ${timeOfDay(limit)}` : ""}`;
}

/** The latest news of several operations: while one moves, all of them are not silent. */
export function newsOf(operations: readonly Operation[]): News {
  const running = operations.filter((one) => one.status === "processing");
  const latest = (times: (string | undefined)[]) => times.reduce<string>((last, time = "") => (Date.parse(time) > Date.parse(last) || last === "" ? time : last), "");
  return { lastProgressAt: latest(running.map((one) => one.lastProgressAt)), timeLimitAt: latest(running.map((one) => one.timeLimitAt)) };
}
