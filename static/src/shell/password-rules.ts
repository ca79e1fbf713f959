// Problems of a change of password by field: those that the browser detects, and the server's refusals. Pure.
import { ApiError } from "../api/client";

/** The form's values. */
export interface Entry {
  old: string;
  next: string;
  repeat: string;
}

/** One sentence per broken rule, by field. */
export type Problems = Partial<Record<keyof Entry, readonly string[]>>;

export const SHORTEST = 8;

/** Every rule that the browser can check. */
export function problems(entry: Entry): Problems {
  const entryProblems: Problems = {};
  if (entry.old === "") entryProblems.old = ["Enter your current password."];
  const next: string[] = [];
  // The server counts characters, not UTF-16 units.
  if (Array.from(entry.next).length < SHORTEST) next.push(`Use at least ${SHORTEST} characters.`);
  if (/^\d+$/.test(entry.next)) next.push("Use at least one character that is not a digit.");
  if (entry.next !== "" && entry.next === entry.old) next.push("The new password must differ from the current one.");
  if (next.length > 0) entryProblems.next = next;
  if (entry.next !== entry.repeat) entryProblems.repeat = ["Passwords do not match."];
  return entryProblems;
}

/** The server's refusals by field; empty if the request failed for another reason. */
export function refused(error: Error): Problems {
  if (!(error instanceof ApiError)) return {};
  const { old = [], new: next = [] } = error.fields;
  if (old.length > 0 || next.length > 0) return { old, next };
  if (error.field === "old") return { old: [error.message] };
  return error.field === "new" ? { next: [error.message] } : {};
}
