// Failures by cause: equal failures are one line, no matter how many nodes or operations have them. Pure.
import type { Operation } from "../live/messages";
import { compareNames, count } from "../lib/format";
import { hasFailed, targetsOf, wholeTarget, type Target } from "./model";
import { phrase, place, stateOf } from "./words";

/** The failures with one cause. */
export interface Cause {
  text: string;
  targets: readonly Target[];
}

/** Failed operations of one kind that failed for the same causes; the latest first. */
export interface FailureGroup {
  id: string;
  operations: readonly Operation[];
  causes: readonly Cause[];
}

/** The failures of an operation; `all`: also those that were dismissed. One without failed targets has failed as a whole. */
export function failuresOf(operation: Operation, all = false): Target[] {
  const failed = targetsOf(operation).filter((target) => hasFailed(target.status));
  if (failed.length === 0 && operation.status === "failed") return [wholeTarget(operation, stateOf(operation))];
  return all ? failed : failed.filter((target) => !target.isDismissed);
}

/** The causes of these operations, the most frequent first. */
export function causesOf(operations: readonly Operation[], all = false): Cause[] {
  const targetsByCause = new Map<string, Target[]>();
  for (const target of operations.flatMap((operation) => failuresOf(operation, all))) {
    const text = target.cause || target.error || "No reason given";
    const targets = targetsByCause.get(text);
    if (targets === undefined) targetsByCause.set(text, [target]);
    else targets.push(target);
  }
  const causes = [...targetsByCause].map(([text, targets]) => ({ text, targets: targets.sort(byName) }));
  return causes.sort((left, right) => right.targets.length - left.targets.length || left.text.localeCompare(right.text));
}

function byName(left: Target, right: Target): number {
  return compareNames(left.name, right.name);
}

/** Failed operations in groups, in the order of their latest failure. */
export function failureGroups(failed: Iterable<Operation>): FailureGroup[] {
  const operationsByGroup = new Map<string, Operation[]>();
  for (const operation of [...failed].sort(latestFirst)) {
    const id = [operation.kind, ...causesOf([operation]).map((cause) => cause.text).sort()].join("\n");
    const operations = operationsByGroup.get(id);
    if (operations === undefined) operationsByGroup.set(id, [operation]);
    else operations.push(operation);
  }
  return [...operationsByGroup].map(([id, operations]) => ({ id, operations, causes: causesOf(operations) }));
}

function latestFirst(left: Operation, right: Operation): number {
  const ended = (operation: Operation) => Date.parse(operation.finishedAt ?? operation.createdAt);
  return ended(right) - ended(left) || right.seq - left.seq;
}

/** "18 nodes"; of several operations "300 operations", or "12 failures in 3 operations" if one failed on several nodes. */
export function numberOf(targets: readonly Target[], isSeveral: boolean): string {
  if (!isSeveral) return count(targets.length, "node");
  const operations = count(new Set(targets.map((target) => target.job.jobID)).size, "operation");
  return operations === count(targets.length, "operation") ? operations : `${count(targets.length, "failure")} in ${operations}`;
}

/** The group in words: the verb, the subject, and where, such as "on 18 nodes". */
export function wordsOf({ operations, causes }: FailureGroup): { verb: string; name: string; where: string } {
  const [first] = operations;
  if (first === undefined) return { verb: "", name: "", where: "" };
  const names = new Set(operations.map((operation) => operation.name));
  const name = names.size === 1 ? first.name : "";
  const nodes = causes.flatMap((cause) => cause.targets.map((target) => target.name));
  const where = operations.length > 1 ? `in ${count(operations.length, "operation")}` : place(first, nodes);
  return { verb: phrase(first, "failed"), name, where };
}
