// The format of figures, times and rates, and the order of names. Pure; binary units; unknown values are not shown.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] as const;
const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

/** Bytes in binary units with at most one decimal: `4.7 GiB`, `1 GiB`, `0 B`. */
export function bytes(count: number): string {
  let value = Math.max(count, 0);
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  // 1023.96 MiB would round to 1024.0 MiB.
  if (unit > 0 && unit < UNITS.length - 1 && value >= 1023.95) {
    value /= 1024;
    unit += 1;
  }
  const text = unit === 0 ? String(Math.round(value)) : value.toFixed(1).replace(/\.0$/, "");
  return `${text} ${UNITS[unit] ?? "B"}`;
}

/** Used and total bytes, with one unit if both have it: `6 / 24 GiB`. */
export function pair(used: number, total: number): string {
  const [left, right] = [bytes(used), bytes(total)];
  return `${left.split(" ")[1] === right.split(" ")[1] ? left.split(" ")[0] ?? "" : left} / ${right}`;
}

/** Bytes a second. */
export function rate(perSecond: number): string {
  return `${bytes(perSecond)}/s`;
}

/** The age by the server's clock: `just now`, `12s ago`, `3m ago`, `5h ago`, `2d ago`. */
export function ago(seconds: number): string {
  if (seconds < 1) return "just now";
  return `${span(seconds)} ago`;
}

/** One coarse unit: `12s`, `3m`, `5h`, `2d`. */
export function span(seconds: number): string {
  if (seconds < MINUTE) return `${Math.floor(seconds)}s`;
  if (seconds < HOUR) return `${Math.floor(seconds / MINUTE)}m`;
  if (seconds < DAY) return `${Math.floor(seconds / HOUR)}h`;
  return `${Math.floor(seconds / DAY)}d`;
}

/** Time left: `45s`, `12 min`, `1h 5m`. */
export function formatTimeLeft(seconds: number): string {
  if (seconds < MINUTE) return `${Math.max(1, Math.ceil(seconds))}s`;
  const minutes = Math.ceil(seconds / MINUTE);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)}h ${minutes % 60}m`;
}

/** A duration: `< 1s`, `40s`, `1m 12s`, `2h 3m`; "" if it is negative or above a day. */
export function duration(seconds: number): string {
  if (seconds < 0 || seconds > DAY) return "";
  if (seconds < 1) return "< 1s";
  if (seconds < MINUTE) return `${Math.floor(seconds)}s`;
  if (seconds < HOUR) return `${Math.floor(seconds / MINUTE)}m ${Math.floor(seconds % MINUTE)}s`;
  return `${Math.floor(seconds / HOUR)}h ${Math.floor((seconds % HOUR) / MINUTE)}m`;
}

// Made once: tables have hundreds of times.
const EXACT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

/** The exact time, with date and zone, for tooltips. */
export function exact(iso: string): string {
  const time = new Date(iso);
  if (Number.isNaN(time.getTime())) return iso;
  return EXACT.format(time);
}

/** The order of names by the rules of the language, numbers by value: `gpu-2` before `gpu-10`. */
export const compareNames = new Intl.Collator(undefined, { numeric: true }).compare;

/** A word with its number: `1 node`, `13 nodes`. */
export function count(number: number, singular: string, plural = `${singular}s`): string {
  return `${number} ${number === 1 ? singular : plural}`;
}

/** The beginning of a text that has one line to show in: no one reads a worker's whole log there. */
export function brief(text: string, most = 300): string {
  return text.length > most ? `${text.slice(0, most)}…` : text;
}

/** A fingerprint in groups of four, so that two people can read it to each other. */
export function grouped(hex: string): string {
  return hex.replace(/(.{4})(?=.)/g, "$1 ");
}
