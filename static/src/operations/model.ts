// Operations as people think of them: the installs of one backend on thirteen nodes are one piece of work with
// thirteen parts. Pure: groups from the operations that the feed has told, with the groups of a moment ago, so that
// progress does not go back and what has not changed keeps its identity.
import type { Operation, OperationTarget } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { ENDED, ownState, stateOf, type PartState, type State } from "./words";

/** One node's part of the work, or the work itself while no node is known. */
export interface Part {
  /** The node's id; the job's if no node is known. */
  id: string;
  nodeID: string;
  name: string;
  job: Operation;
  /** How the target is, or its operation when that says more. */
  status: PartState;
  /** 0 to 100. */
  value: number;
  file: string;
  phase: string;
  /** Of a part that failed. */
  error: string;
  /** What it waits for, or what there is to say of its end. */
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
  /** The nodes of the run under way, or of the failures if nothing is. */
  parts: readonly Part[];
  /** Parts that ended well. */
  done: number;
  /** Over all parts, 0 to 99: it is not done before the last one ends. */
  progress: number;
  /** Bytes of all parts; `total` 0 unless all that is under way know theirs. */
  current: number;
  total: number;
  /** The operation that speaks for the group. */
  speaker: Operation;
}

/** Requests of one press reach the server one after the other; the first may have ended before the last comes. */
const ONE_PRESS_MS = 5_000;

/** Operations on one element are told together. */
export function groupID(operation: Pick<Operation, "kind" | "name">): string {
  return `${operation.kind} ${operation.name}`;
}

/** What runs, waits, or failed and is not dismissed: failures first, then the least advanced. */
export function groups(operations: Iterable<Operation>, before: ReadonlyMap<string, Group>): Group[] {
  const all = new Map<string, Operation[]>();
  for (const operation of operations) {
    const id = groupID(operation);
    const known = all.get(id);
    if (known === undefined) all.set(id, [operation]);
    else known.push(operation);
  }
  const found: Group[] = [];
  for (const [id, members] of all) {
    const group = groupOf(id, members, before.get(id));
    if (group !== null) found.push(group);
  }
  return found.sort(byUrgency);
}

/** The group as if nothing of it had failed: what is still under way. */
export function underWay(group: Group): Group {
  if (group.failed.length === 0) return group;
  const speaker = spokesman([], group.active) ?? group.speaker;
  return { ...group, failed: [], state: stateOfAll(group.active), speaker };
}

function spokesman(failed: readonly Operation[], active: readonly Operation[]): Operation | undefined {
  return failed.at(-1) ?? active.find((one) => stateOf(one) === "running") ?? active[0];
}

function byUrgency(left: Group, right: Group): number {
  const failed = Number(right.failed.length > 0) - Number(left.failed.length > 0);
  if (failed !== 0) return failed;
  // The latest failure is the one that somebody waits to hear of.
  if (left.failed.length > 0) return endOf(right.speaker) - endOf(left.speaker) || left.id.localeCompare(right.id);
  return left.progress - right.progress || left.id.localeCompare(right.id);
}

function groupOf(id: string, members: readonly Operation[], before: Group | undefined): Group | null {
  const active = members.filter(isActive).sort(byAge);
  const failed = members.filter(needsAttention).sort(byAge);
  const speaker = spokesman(failed, active);
  if (speaker === undefined) return null;
  const run = active.length > 0 ? runOf(active, members) : failed;
  const parts = latestParts(run);
  if (before !== undefined && same(before, active, failed, parts)) return before;
  const state = failed.length > 0 ? "failed" : stateOfAll(active);
  const done = parts.filter((part) => part.status === "success").length;
  const progress = active.length > 0 ? advanced(parts, active, before) : 0;
  return { id, kind: speaker.kind, name: speaker.name, state, active, failed, parts, done, progress, ...bytesOf(parts), speaker };
}

function stateOfAll(active: readonly Operation[]): Group["state"] {
  const states = new Set(active.map(stateOf));
  for (const state of ["running", "overdue", "retrying", "waiting"] as const) if (states.has(state)) return state;
  return "queued";
}

function byAge(left: Operation, right: Operation): number {
  return Date.parse(left.createdAt) - Date.parse(right.createdAt) || left.seq - right.seq;
}

function same(before: Group, active: readonly Operation[], failed: readonly Operation[], parts: readonly Part[]): boolean {
  const equal = (left: readonly unknown[], right: readonly unknown[]) =>
    left.length === right.length && left.every((one, index) => one === right[index]);
  const jobs = (of: readonly Part[]) => of.map((part) => part.job);
  return equal(before.active, active) && equal(before.failed, failed) && equal(jobs(before.parts), jobs(parts));
}

/**
 * `started` and what has ended beside it: the stretch of time in which some of this work was always under way.
 * What was cancelled is not part of what is still wanted.
 */
export function runOf(started: readonly Operation[], members: readonly Operation[]): Operation[] {
  const run = [...started];
  const known = new Set(started);
  let since = Math.min(...started.map((one) => Date.parse(one.createdAt)));
  const ended = members
    .filter((one) => !known.has(one) && (one.status === "completed" || one.status === "failed"))
    .sort((left, right) => endOf(right) - endOf(left));
  for (const one of ended) {
    if (endOf(one) + ONE_PRESS_MS < since) break;
    since = Math.min(since, Date.parse(one.createdAt));
    run.push(one);
  }
  return run;
}

function endOf(operation: Operation): number {
  return Date.parse(operation.finishedAt ?? operation.createdAt);
}

/** The parts of a run, one a node: a retry replaces the failure before it. */
export function latestParts(run: readonly Operation[]): Part[] {
  const parts = new Map<string, Part>();
  for (const operation of [...run].sort(byAge)) for (const part of partsOf(operation)) parts.set(part.id, part);
  return [...parts.values()].sort((left, right) => left.name.localeCompare(right.name, undefined, { numeric: true }));
}

/** An operation's parts. */
export function partsOf(operation: Operation): Part[] {
  const state = stateOf(operation);
  const { nodes = [] } = operation;
  if (nodes.length === 0) return [wholePart(operation, state)];
  return nodes.map((target) => partOf(operation, state, target, nodes.length === 1));
}

const UNSAID = { file: "", phase: "", error: "", reason: "", current: 0, total: 0, attempts: 0, nextLookAt: "", overdueSince: "", lastProgressAt: "", timeLimitAt: "", startedAt: "", finishedAt: "" };

/** What is there of these values. */
function told<Values extends object>(values: Values): { [Key in keyof Values]?: Exclude<Values[Key], undefined> } {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined)) as ReturnType<typeof told<Values>>;
}

function partOf(operation: Operation, state: State, target: OperationTarget, alone: boolean): Part {
  const status = statusOf(state, target);
  // The only part has what its operation says, where it says nothing itself.
  const otherwise = alone ? wholePart(operation, state) : UNSAID;
  const own = told({
    file: target.file_name,
    phase: target.phase,
    error: target.error,
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
  const part = { ...otherwise, phase: "", ...own, id: target.node_id, nodeID: target.node_id, name: target.node_name, job: operation, status };
  // Until its end, what stands there is the reason of a wait.
  return { ...part, value: valueOf(status, target.percentage), error: hasFailed(status) ? part.error : "" };
}

function wholePart(operation: Operation, state: State): Part {
  const nodeID = operation.nodeID ?? "";
  const status = state === "completed" ? "success" : state;
  return {
    // Two replicas of a model may be loaded on one node at once: no load takes the place of another.
    id: nodeID === "" || operation.kind === "model_load" ? operation.jobID : nodeID,
    nodeID,
    name: operation.nodeName ?? "",
    job: operation,
    status,
    value: valueOf(status, operation.progress),
    file: "",
    phase: operation.phase ?? "",
    error: operation.error ?? "",
    reason: ENDED.has(status) ? "" : operation.message,
    current: operation.currentBytes ?? 0,
    total: operation.totalBytes ?? 0,
    attempts: operation.attempts,
    nextLookAt: operation.nextLookAt,
    overdueSince: "",
    lastProgressAt: operation.lastProgressAt ?? "",
    timeLimitAt: operation.timeLimitAt ?? "",
    startedAt: operation.startedAt ?? "",
    finishedAt: operation.finishedAt ?? "",
  };
}

/** Whether a part ended badly. */
export function hasFailed(status: PartState): boolean {
  return status === "error" || status === "failed";
}

/** The names of the nodes on which these operations failed. */
export function failedNodes(operations: readonly Operation[]): string[] {
  return latestParts(operations).filter((part) => hasFailed(part.status)).map((part) => part.name);
}

function statusOf(state: State, target: OperationTarget): PartState {
  const own = ownState(target);
  if (state === "completed") return own === "cancelled" || own === "superseded" ? own : "success";
  // A part that is done is done, no matter what the rest of its operation waits for.
  if (ENDED.has(own) || state === "running" || state === "overdue") return own;
  // A part that says nothing of itself is as its operation is.
  return own === "waiting" || own === "retrying" || own === "overdue" ? own : state;
}

function valueOf(status: PartState, percentage: number): number {
  if (status === "success") return 100;
  if (status === "queued") return 0;
  return Math.min(Math.max(percentage, 0), 100);
}

/** The mean of what has not failed, never 100, and never less than a moment ago unless work came in: then there is more to do. */
function advanced(parts: readonly Part[], active: readonly Operation[], before: Group | undefined): number {
  const going = parts.filter((part) => !hasFailed(part.status));
  const mean = going.reduce((sum, part) => sum + part.value, 0) / Math.max(going.length, 1);
  const now = Math.min(mean, 99);
  if (before === undefined || before.active.length === 0) return now;
  const known = new Set(before.active.map((one) => one.jobID));
  const more = parts.length > before.parts.length || active.some((one) => !known.has(one.jobID));
  return more ? now : Math.max(now, before.progress);
}

function bytesOf(parts: readonly Part[]): { current: number; total: number } {
  let current = 0;
  let total = 0;
  let known = true;
  for (const part of parts) {
    if (part.status === "success") {
      current += part.total;
      total += part.total;
    } else if (!ENDED.has(part.status)) {
      current += part.current;
      total += part.total;
      known = known && part.total > 0;
    }
  }
  return { current, total: known ? total : 0 };
}
