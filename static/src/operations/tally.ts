// Parts counted by how they are, worst first: "2 failed · 1 waiting · 10 done". Pure.
import type { Part } from "./model";
import type { PartState } from "./words";

const COUNTED: readonly (readonly [string, readonly PartState[]])[] = [
  ["failed", ["error", "failed"]],
  ["running on the worker", ["overdue"]],
  ["retrying", ["retrying"]],
  ["waiting", ["waiting"]],
  ["running", ["running", "downloading"]],
  ["queued", ["queued"]],
  ["cancelled", ["cancelled"]],
  ["superseded", ["superseded"]],
  ["done", ["success", "completed"]],
];

export function tally(parts: readonly Pick<Part, "status">[]): string {
  const found = COUNTED.map(([word, states]) => [parts.filter((part) => states.includes(part.status)).length, word] as const);
  return found.filter(([number]) => number > 0).map(([number, word]) => `${number} ${word}`).join(" · ");
}
