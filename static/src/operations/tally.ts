// Parts counted by how they are, worst first: "2 failed · 1 waiting · 10 done". Pure.
import type { Target } from "./model";
import type { TargetState } from "./words";

const COUNTED: readonly (readonly [string, readonly TargetState[]])[] = [
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

export function tally(targets: readonly Pick<Target, "status">[]): string {
  const counts = COUNTED.map(([word, states]) => [targets.filter((target) => states.includes(target.status)).length, word] as const);
  return counts.filter(([number]) => number > 0).map(([number, word]) => `${number} ${word}`).join(" · ");
}
