// Announcements of ends, each once, and only of those that the feed reported. An operation that is merely gone (after a
// cut, or dismissed by another person) has no known outcome.
import { brief, count } from "../lib/format";
import type { Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { countNodes, failedNodes, groupID, latestTargets, namesOf, runOf } from "./model";
import { phrase, place } from "./words";

type Operations = ReadonlyMap<string, Operation>;

export interface End {
  group: string;
  tone: "good" | "bad" | "quiet";
  text: string;
}

/** The ends between two moments. `before` null: the page has only begun to watch. */
export function ends(previous: Operations | null, after: Operations): End[] {
  if (previous === null || previous === after) return [];
  const ended = new Map<string, Operation[]>();
  for (const operation of after.values()) {
    const was = previous.get(operation.jobID);
    if (was === operation || isActive(operation) || (was !== undefined && !isActive(was))) continue;
    ended.set(groupID(operation), [...(ended.get(groupID(operation)) ?? []), operation]);
  }
  return [...ended].flatMap(([id, operations]) => groupEnds(id, operations, after));
}

function groupEnds(id: string, ended: readonly Operation[], after: Operations): End[] {
  const failed = ended.filter(needsAttention);
  const cancelled = ended.filter((operation) => operation.status === "cancelled");
  const groupEndings: End[] = [];
  if (failed[0] !== undefined) groupEndings.push({ group: id, tone: "bad", text: failure(failed, failed[0]) });
  if (cancelled[0] !== undefined) groupEndings.push({ group: id, tone: "quiet", text: sentence(cancelled, cancelled[0]) });
  const members = [...after.values()].filter((operation) => groupID(operation) === id);
  const completed = ended.filter((operation) => operation.status === "completed");
  // Of thirteen nodes only the last one is announced, for all of them.
  if (completed.length > 0 && !members.some(isActive)) groupEndings.push(success(id, runOf(completed, members)));
  return groupEndings;
}

function sentence(operations: readonly Operation[], first: Operation): string {
  return [phrase(first, "cancelled"), first.name, place(first, namesOf(latestTargets(operations)))].filter(Boolean).join(" ");
}

function failure(operations: readonly Operation[], first: Operation): string {
  const where = place(first, failedNodes(operations));
  return `${[phrase(first, "failed"), first.name, where].filter(Boolean).join(" ")}: ${first.error ?? "No reason given"}`;
}

function success(group: string, run: readonly Operation[]): End {
  const targets = latestTargets(run);
  const well = targets.filter((target) => target.status === "success");
  const [first] = well;
  if (first === undefined) return { group, tone: "good", text: "" };
  const nodes = namesOf(well);
  const { all } = countNodes(targets);
  const where = nodes.length > 0 && nodes.length < all ? `on ${nodes.length} of ${count(all, "node")}` : place(first.job, nodes);
  return { group, tone: "good", text: [phrase(first.job, "completed"), first.job.name, where].filter(Boolean).join(" ") };
}

const SPOKEN = 3;
const LONGEST = 200;

/** Ends of one moment in one announcement: the page's region holds one, and nobody listens to a whole log. */
export function spoken(announcements: readonly End[]): string {
  const texts = announcements.slice(0, SPOKEN).map(({ text }) => brief(text, LONGEST));
  if (announcements.length > SPOKEN) texts.push(`${announcements.length - SPOKEN} more finished`);
  return texts.join(". ");
}
