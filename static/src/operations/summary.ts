// A group in one line of words, the same on the strip and on its card. Pure.
import { brief, count } from "../lib/format";
import type { Group } from "./model";
import { phaseOf, phrase, place, stateOf } from "./words";

/** "Installing backend": what comes before the name. */
export function headline(group: Group): string {
  return phrase(group.speaker, group.state);
}

/** Where: "7 of 13 nodes", "on gpu-1"; of a failure the nodes that failed. */
export function where(group: Group): string {
  if (group.state === "failed" && group.failed.length > 1) return `on ${count(group.failed.length, "node")}`;
  if (group.state === "failed") return place(group.speaker, [group.speaker.nodeName ?? ""]);
  if (group.parts.length > 1) {
    const failed = group.parts.filter((part) => part.job.status === "failed").length;
    return `${group.done} of ${count(group.parts.length, "node")}${failed > 0 ? `, ${failed} failed` : ""}`;
  }
  return place(group.speaker, [group.parts[0]?.name ?? ""]);
}

/** What it is at, or why it is not: the error, the reason of the wait, the phase. */
export function what(group: Group): string {
  if (group.state === "failed") return brief(group.speaker.error ?? "No reason given");
  return phaseOf(group.speaker);
}

/** Whether its progress is worth a bar (§2.1): nothing that is queued, waits, failed or has not begun. */
export function hasBar(group: Group): boolean {
  return group.state === "running" && group.progress >= 1;
}

/** Whether the speaker says when it looks again. */
export function looksAgain(group: Group): boolean {
  return group.state === "waiting" && stateOf(group.speaker) === "waiting";
}
