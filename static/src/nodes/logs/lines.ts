// The lines of a log: how they are kept, filtered and written. Pure.
import type { components } from "../../api/schema";

export type Stream = "stdout" | "stderr";

export interface Line {
  /** Counts up from the first line of this page. */
  number: number;
  timestamp: string;
  stream: Stream;
  text: string;
}

/** Lines that a page keeps; older ones go. */
export const MAX_LINES = 10_000;
/** Lines that are drawn together. */
export const CHUNK = 200;

type LogLine = components["schemas"]["LogLine"];

/** Colours and cursor movements of terminals. */
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;

/** The text without what a terminal would make colours of. */
export function plain(text: string): string {
  return text.includes("\u001b") ? text.replace(ESCAPES, "") : text;
}

/** These lines after those that there are, the newest `KEPT`. */
export function appended(lines: readonly Line[], received: readonly LogLine[]): readonly Line[] {
  if (received.length === 0) return lines;
  let number = lines.at(-1)?.number ?? 0;
  const newLines = received.map((line) => ({ number: ++number, timestamp: line.timestamp, stream: line.stream, text: plain(line.text) }));
  return [...lines, ...newLines].slice(-MAX_LINES);
}

/** The worker's lines after those that this page received before the connection was lost. */
export function rejoined(lines: readonly Line[], received: readonly LogLine[]): readonly Line[] {
  const [first] = received;
  if (first === undefined) return lines;
  const text = plain(first.text);
  const same = lines.findIndex((line) => line.timestamp === first.timestamp && line.text === text && line.stream === first.stream);
  return appended(same < 0 ? lines : lines.slice(0, same), received);
}

export interface Choice {
  term: string;
  stream: Stream | "";
}

/** The lines that contain the term, whatever its case, in the chosen stream. */
export function chosen(lines: readonly Line[], { term, stream }: Choice): readonly Line[] {
  if (term === "" && stream === "") return lines;
  const needle = term.toLowerCase();
  return lines.filter((line) => (stream === "" || line.stream === stream) && line.text.toLowerCase().includes(needle));
}

/** The lines in parts that stay the same while others come and go. */
export function chunks(lines: readonly Line[]): (readonly Line[])[] {
  const parts: Line[][] = [];
  let last = -1;
  for (const line of lines) {
    const part = Math.floor(line.number / CHUNK);
    if (part !== last) parts.push([]);
    parts.at(-1)?.push(line);
    last = part;
  }
  return parts;
}

/** True if two parts show the same lines: a line never changes. */
export function alike(first: readonly Line[], second: readonly Line[]): boolean {
  return first.length === second.length && first[0]?.number === second[0]?.number && first.at(-1)?.number === second.at(-1)?.number;
}

/** The text in pieces, every second one what was searched for. */
export function pieces(text: string, term: string): string[] {
  if (term === "") return [text];
  const lower = text.toLowerCase();
  // A letter may be longer in lower case: then no place in one text is a place in the other.
  if (lower.length !== text.length) return [text];
  const matches: string[] = [];
  const needle = term.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(needle); at >= 0; at = lower.indexOf(needle, from)) {
    matches.push(text.slice(from, at), text.slice(at, at + term.length));
    from = at + term.length;
  }
  return [...matches, text.slice(from)];
}

/** The lines as a text file. */
export function asText(lines: readonly Line[]): string {
  return lines.map((line) => `${line.timestamp} ${line.stream} ${line.text}\n`).join("");
}

/** A name for that file which every system takes. */
export function fileName(node: string, of: string, now: Date): string {
  const stem = `${node}-${of}`.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 100);
  return `${stem}-${now.toISOString().slice(0, 19).replace(/:/g, "")}.log`;
}

/** The time of day with milliseconds, in the reader's zone. */
export function timeOf(timestamp: string): string {
  const time = new Date(timestamp);
  if (Number.isNaN(time.getTime())) return timestamp.slice(0, 12);
  const two = (value: number) => String(value).padStart(2, "0");
  const part = String(time.getMilliseconds()).padStart(3, "0");
  return `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}.${part}`;
}

const CHOICES = { of: "of", term: "q", stream: "stream" } as const;

export interface Place extends Choice {
  /** A model, or one replica as `model#0`; "" for none yet. */
  of: string;
}

/** The state in the address. */
export function placeIn(query: URLSearchParams): Place {
  const stream = query.get(CHOICES.stream);
  return {
    of: query.get(CHOICES.of) ?? "",
    term: query.get(CHOICES.term) ?? "",
    stream: stream === "stdout" || stream === "stderr" ? stream : "",
  };
}

/** The address of that. */
export function addressOf(place: Place): URLSearchParams {
  const query = new URLSearchParams();
  if (place.of !== "") query.set(CHOICES.of, place.of);
  if (place.term !== "") query.set(CHOICES.term, place.term);
  if (place.stream !== "") query.set(CHOICES.stream, place.stream);
  return query;
}

/** The address of the log of one replica or model. */
export function logAddress(node: string, of = ""): string {
  return `/app/nodes/${node}/logs${of === "" ? "" : `?${addressOf({ of, term: "", stream: "" }).toString()}`}`;
}

/** The model of a log's name. */
export function modelOf(of: string): string {
  return of.split("#", 1)[0] ?? "";
}
