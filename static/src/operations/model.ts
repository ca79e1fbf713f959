// Operations as people think of them: the installs of one backend on thirteen nodes are one piece of work with
// thirteen parts. Pure: groups from the operations that the feed has told, with the groups of a moment ago, so that
// progress does not go back and what has not changed keeps its identity.
import { compareNames } from "../lib/format";
import type { Operation, OperationTarget } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { ENDED, ownState, stateOf, type TargetState, type State } from "./words";

/** One target: a node's share of the work, or the whole work while no node is known. */
export interface Target {
  /** The node's id; the job's if no node is known. */
  id: string;
  nodeID: string;
  name: string;
  job: Operation;
  /** The target's state, or its operation's if that is more specific. */
  status: TargetState;
  /** 0 to 100. */
  value: number;
  file: string;
  phase: string;
  /** The error of a failed target. */
  error: string;
  /** The error without what differs from node to node. */
  cause: string;
  /** True if the failure was dismissed or tried again, apart from those on other nodes. */
  isDismissed: boolean;
  /** The reason of a wait, or the outcome. */
  reason: string;
  current: number;
  /** 0 if not known. */
  total: number;
  /** Attempts that failed. */
  attempts: number;
  /** Times; "" if there is none. */
  nextLookAt: string;
  overdueSince: string;
  lastProgressAt: string;
  timeLimitAt: string;
  startedAt: string;
  finishedAt: string;
}

export interface Group {
  id: string;
  kind: string;
  name: string;
  state: Exclude<State, "completed" | "cancelled">;
  active: readonly Operation[];
  failed: readonly Operation[];
  /** What began together with the active ones and has ended beside them; the failures if nothing is active. */
  run: readonly Operation[];
  /** The nodes of the run under way, or of the failures if nothing is. */
  targets: readonly Target[];
  /** Mean of all targets, 0 to 99: it is not done before the last one ends. */
  progress: number;
  /** Bytes of all targets; `total` is 0 unless every running one has a size. */
  current: number;
  total: number;
  /** The operation that speaks for the group. */
  speaker: Operation;
}

/** Requests of one press reach the server one after the other; the first may have ended before the last comes. */
const ONE_PRESS_MS = 5_000;

/** Operations on one element are grouped. */
export function groupID(operation: Pick<Operation, "kind" | "name">): string {
  return `${operation.kind} ${operation.name}`;
}

/** Running, waiting, and failed operations that are not dismissed: failures first, then the least advanced. */
export function groups(operations: Iterable<Operation>, previous: ReadonlyMap<string, Group>): Group[] {
  const operationsByGroup = new Map<string, Operation[]>();
  for (const operation of operations) {
    const id = groupID(operation);
    const previous = operationsByGroup.get(id);
    if (previous === undefined) operationsByGroup.set(id, [operation]);
    else previous.push(operation);
  }
  const result: Group[] = [];
  for (const [id, members] of operationsByGroup) {
    const group = groupOf(id, members, previous.get(id));
    if (group !== null) result.push(group);
  }
  return result.sort(byUrgency);
}

function spokesman(failed: readonly Operation[], active: readonly Operation[]): Operation | undefined {
  return failed.at(-1) ?? active.find((operation) => stateOf(operation) === "running") ?? active[0];
}

function byUrgency(left: Group, right: Group): number {
  const failed = Number(right.failed.length > 0) - Number(left.failed.length > 0);
  if (failed !== 0) return failed;
  // The latest failure is the one that somebody waits to hear of.
  if (left.failed.length > 0) return endOf(right.speaker) - endOf(left.speaker) || left.id.localeCompare(right.id);
  return left.progress - right.progress || left.id.localeCompare(right.id);
}

function groupOf(id: string, members: readonly Operation[], previous: Group | undefined): Group | null {
  const active = members.filter(isActive).sort(byAge);
  const failed = members.filter(needsAttention).sort(byAge);
  const speaker = spokesman(failed, active);
  if (speaker === undefined) return null;
  const run = active.length > 0 ? runOf(active, members) : failed;
  if (previous !== undefined && same(previous, active, failed, run)) return previous;
  const targets = latestTargets(run);
  const state = failed.length > 0 ? "failed" : stateOfAll(active);
  const progress = active.length > 0 ? advanced(targets, active, previous) : 0;
  return { id, kind: speaker.kind, name: speaker.name, state, active, failed, run, targets, progress, ...bytesOf(targets), speaker };
}

function stateOfAll(active: readonly Operation[]): Group["state"] {
  const states = new Set(active.map(stateOf));
  for (const state of ["running", "overdue", "retrying", "waiting"] as const) if (states.has(state)) return state;
  return "queued";
}

function byAge(left: Operation, right: Operation): number {
  return Date.parse(left.createdAt) - Date.parse(right.createdAt) || left.seq - right.seq;
}

function same(previous: Group, active: readonly Operation[], failed: readonly Operation[], run: readonly Operation[]): boolean {
  const equal = (left: readonly unknown[], right: readonly unknown[]) =>
    left.length === right.length && left.every((value, index) => value === right[index]);
  return equal(previous.active, active) && equal(previous.failed, failed) && equal(previous.run, run);
}

/**
 * `started` and what has ended beside it: the stretch of time in which some of this work was always under way.
 * Cancelled operations do not count.
 */
export function runOf(started: readonly Operation[], members: readonly Operation[]): Operation[] {
  const run = [...started];
  const startedOperations = new Set(started);
  let since = Math.min(...started.map((operation) => Date.parse(operation.createdAt)));
  const ended = members
    .filter((operation) => !startedOperations.has(operation) && (operation.status === "completed" || operation.status === "failed"))
    .sort((left, right) => endOf(right) - endOf(left));
  for (const operation of ended) {
    if (endOf(operation) + ONE_PRESS_MS < since) break;
    since = Math.min(since, Date.parse(operation.createdAt));
    run.push(operation);
  }
  return run;
}

function endOf(operation: Operation): number {
  return Date.parse(operation.finishedAt ?? operation.createdAt);
}

/** The parts of a run, one a node: a retry replaces the failure before it. */
export function latestTargets(run: readonly Operation[]): Target[] {
  const targets = new Map<string, Target>();
  for (const operation of [...run].sort(byAge)) for (const target of targetsOf(operation)) targets.set(target.id, target);
  return [...targets.values()].sort((left, right) => compareNames(left.name, right.name));
}

/** The targets of an operation. */
export function targetsOf(operation: Operation): Target[] {
  const state = stateOf(operation);
  const { nodes = [] } = operation;
  if (nodes.length === 0) return [wholeTarget(operation, state)];
  return nodes.map((target) => targetFrom(operation, state, target, nodes.length === 1));
}

const NO_FIELDS = { file: "", phase: "", error: "", cause: "", isDismissed: false, reason: "", current: 0, total: 0, attempts: 0, nextLookAt: "", overdueSince: "", lastProgressAt: "", timeLimitAt: "", startedAt: "", finishedAt: "" };

/** Returns the values that are defined. */
function omitUndefined<Values extends object>(values: Values): { [Key in keyof Values]?: Exclude<Values[Key], undefined> } {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined)) as ReturnType<typeof omitUndefined<Values>>;
}

function targetFrom(operation: Operation, state: State, target: OperationTarget, alone: boolean): Target {
  const status = statusOf(state, target);
  // An only target takes missing fields from its operation.
  const otherwise = alone ? wholeTarget(operation, state) : NO_FIELDS;
  const ownFields = omitUndefined({
    file: target.file_name,
    phase: target.phase,
    error: target.error,
    cause: target.cause,
    reason: target.reason,
    current: target.current_bytes,
    total: target.total_bytes,
    attempts: target.attempts,
    nextLookAt: target.nextLookAt,
    overdueSince: target.overdueSince,
    lastProgressAt: target.lastProgressAt,
    timeLimitAt: target.timeLimitAt,
    startedAt: target.startedAt,
    finishedAt: target.finishedAt,
  });
  const result = { ...otherwise, phase: "", ...ownFields, isDismissed: target.dismissedAt !== undefined, id: target.node_id, nodeID: target.node_id, name: target.node_name, job: operation, status };
  // Until its end, what stands there is the reason of a wait.
  return { ...result, value: valueOf(status, target.percentage), error: hasFailed(status) ? result.error : "" };
}

/** The operation as its only target. */
export function wholeTarget(operation: Operation, state: State): Target {
  const nodeID = textOf(operation.nodeID);
  const status = state === "completed" ? "success" : state;
  return {
    // Two replicas of a model may be loaded on one node at once: no load takes the place of another.
    id: nodeID === "" || operation.kind === "model_load" ? operation.jobID : nodeID,
    nodeID,
    name: textOf(operation.nodeName),
    job: operation,
    status,
    value: valueOf(status, operation.progress),
    file: "",
    phase: textOf(operation.phase),
    error: textOf(operation.error),
    cause: textOf(operation.cause),
    isDismissed: false,
    reason: ENDED.has(status) ? "" : operation.message,
    current: sizeOf(operation.currentBytes),
    total: sizeOf(operation.totalBytes),
    attempts: operation.attempts,
    nextLookAt: operation.nextLookAt,
    overdueSince: "",
    lastProgressAt: textOf(operation.lastProgressAt),
    timeLimitAt: textOf(operation.timeLimitAt),
    startedAt: textOf(operation.startedAt),
    finishedAt: textOf(operation.finishedAt),
  };
}

function textOf(value: string | undefined): string {
  return value ?? "";
}

function sizeOf(value: number | undefined): number {
  return value ?? 0;
}

/** True if a target has failed. */
export function hasFailed(status: TargetState): boolean {
  return status === "error" || status === "failed";
}

/** The names of the nodes, each once: several loads of a model may be on one node. */
export function namesOf(targets: readonly Target[]): string[] {
  return [...new Set(targets.map((target) => target.name))].filter(Boolean);
}

/** The names of the nodes on which these operations failed. */
export function failedNodes(operations: readonly Operation[]): string[] {
  return namesOf(latestTargets(operations).filter((target) => hasFailed(target.status)));
}

/** The number of nodes, of those on which all has succeeded, and of those on which something failed. */
export function countNodes(targets: readonly Target[]): { all: number; done: number; failed: number } {
  // A load whose node is not known yet counts as one.
  const ids = (some: readonly Target[]) => new Set(some.map((target) => target.nodeID || target.id));
  const unfinished = ids(targets.filter((target) => target.status !== "success"));
  const all = ids(targets).size;
  return { all, done: all - unfinished.size, failed: ids(targets.filter((target) => hasFailed(target.status))).size };
}

function statusOf(state: State, target: OperationTarget): TargetState {
  const targetState = ownState(target);
  if (state === "completed") return targetState === "cancelled" || targetState === "superseded" ? targetState : "success";
  // An ended target stays ended, no matter what the rest of its operation waits for.
  if (ENDED.has(targetState) || state === "running" || state === "overdue") return targetState;
  // A target without a state of its own has its operation's.
  return targetState === "waiting" || targetState === "retrying" || targetState === "overdue" ? targetState : state;
}

function valueOf(status: TargetState, percentage: number): number {
  if (status === "success") return 100;
  if (status === "queued") return 0;
  return Math.min(Math.max(percentage, 0), 100);
}

/** The mean of what has not failed, never 100, and never less than a moment ago unless work came in: then there is more to do. */
function advanced(targets: readonly Target[], active: readonly Operation[], previous: Group | undefined): number {
  const remaining = targets.filter((target) => !hasFailed(target.status));
  const mean = remaining.reduce((sum, target) => sum + target.value, 0) / Math.max(remaining.length, 1);
  const now = Math.min(mean, 99);
  if (previous === undefined || previous.active.length === 0) return now;
  const knownJobs = new Set(previous.active.map((operation) => operation.jobID));
  const isLarger = targets.length > previous.targets.length || active.some((operation) => !knownJobs.has(operation.jobID));
  return isLarger ? now : Math.max(now, previous.progress);
}

function bytesOf(targets: readonly Target[]): { current: number; total: number } {
  let current = 0;
  let total = 0;
  let isComplete = true;
  for (const target of targets) {
    if (target.status === "success") {
      current += target.total;
      total += target.total;
    } else if (!ENDED.has(target.status)) {
      current += target.current;
      total += target.total;
      isComplete = isComplete && target.total > 0;
    }
  }
  return { current, total: isComplete ? total : 0 };
}
