// A group in one line of words, the same on the strip and on its card. Pure.
import { brief, count } from "../lib/format";
import { figures } from "./lines";
import { countNodes, failedNodes, namesOf, type Group } from "./model";
import type { Pace } from "./pace";
import { tally } from "./tally";
import { ENDED, phaseOf, phrase, place, rests, sendingOf, stateOf, type TargetState } from "./words";

/** "Installing backend": what comes before the name. */
export function headline(group: Group): string {
  return phrase(group.speaker, group.state);
}

/** The place: "7 of 13 nodes", "on gpu-1"; of a failure the nodes that failed. */
export function where(group: Group): string {
  if (group.state === "failed") return place(group.speaker, failedNodes(group.failed));
  const { all, done, failed } = countNodes(group.targets);
  if (all > 1) return `${done} of ${count(all, "node")}${failed > 0 ? `, ${failed} failed` : ""}`;
  return place(group.speaker, namesOf(group.targets));
}

const MOVING: ReadonlySet<TargetState> = new Set(["running", "downloading"]);

/** The error, the reason of the wait, or the phase. */
export function subjectOf(group: Group): string {
  if (group.state === "failed") return brief(group.speaker.error ?? "No reason given");
  // Of several parts: how those are that have not ended; `where` counts the others.
  const remaining = group.targets.filter((target) => !ENDED.has(target.status));
  const [last] = remaining;
  const several = (group.speaker.nodes ?? []).length > 1;
  if (several && remaining.length > 1) return tally(remaining);
  if (several && last !== undefined && MOVING.has(last.status)) return last.phase || last.status;
  return phaseOf(group.speaker);
}

/** Bytes, rate and time left; "" if `subjectOf` has them: of files that are sent. */
export function numbers(group: Group, pace: Pace | undefined): string {
  const sending = sendingOf(group.speaker);
  return sending !== "" && sending === subjectOf(group) ? "" : figures(group.current, group.total, pace);
}

/** True if its progress is worth a bar (§2.1): nothing that is queued, waits, failed or has not begun. */
export function hasBar(group: Group): boolean {
  return group.state === "running" && group.progress >= 1;
}

/** True if the group's operation has a time of its next check. */
export function hasNextCheck(group: Group): boolean {
  return group.state !== "failed" && rests(stateOf(group.speaker));
}
