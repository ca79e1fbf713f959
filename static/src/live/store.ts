// The live state, changed by the messages of the feed and by nothing else. `apply` is pure; the
// store gathers messages and applies them once a frame, so that a burst of ten thousand costs as much as one.
import { Listeners } from "../lib/listeners";
import { NextFrame } from "../lib/next-frame";
import type { BackendsMessage, FeedMessage, LiveNode, LiveNodePatch, Notice, Operation } from "./messages";

/** The state of the feed: `live`, or why the page may be out of date. */
export type Connection = "connecting" | "live" | "stale" | "signed-out" | "forbidden";

export interface LiveState {
  connection: Connection;
  /** When the feed was lost (ms of this browser), null while it is live. */
  staleSince: number | null;
  /** Server time minus this browser's, in ms. */
  skew: number;
  build: string;
  /** The server's version; "" as long as it is not known. */
  version: string;
  /** The build changed while the page was open. */
  outdated: boolean;
  operations: ReadonlyMap<string, Operation>;
  operationsSeq: number | null;
  nodes: ReadonlyMap<string, LiveNode>;
  nodesCursor: string | null;
  notices: readonly Notice[];
  /** Signs of life since the page was opened, one every few seconds. */
  beats: number;
  /** The revision of the lists of backends, and the state of the upgrade check; null before the first message. */
  backends: BackendsMessage | null;
  /** The revision of the scheduling rules and of what passes made of them; null until it is told. */
  rules: string | null;
  /** The revision of the stored model definitions; null until it is told. */
  definitions: string | null;
}

export const EMPTY: LiveState = {
  connection: "connecting",
  staleSince: null,
  skew: 0,
  build: "",
  version: "",
  outdated: false,
  operations: new Map(),
  operationsSeq: null,
  nodes: new Map(),
  nodesCursor: null,
  notices: [],
  beats: 0,
  backends: null,
  rules: null,
  definitions: null,
};

/** Operations that ended well are remembered for groups and for the word of success, up to this many. */
const ENDED_KEPT = 300;

const ACTIVE = new Set<Operation["status"]>(["pending", "processing", "waiting_for_nodes"]);

/** True if it has not ended. */
export function isActive(operation: Operation): boolean {
  return ACTIVE.has(operation.status);
}

/** True if it failed and is not dismissed. */
export function needsAttention(operation: Operation): boolean {
  return operation.status === "failed" && operation.dismissedAt === undefined;
}

/** The state after these messages, in their order. */
export function apply(state: LiveState, messages: readonly FeedMessage[], now: number): LiveState {
  if (messages.length === 0) return state;
  const next = { ...state, connection: "live" as const, staleSince: null };
  for (const message of messages) step(next, state, message, now);
  return next;
}

function step(next: LiveState, previous: LiveState, message: FeedMessage, now: number): void {
  switch (message.type) {
    case "hello":
      next.skew = Date.parse(message.at) - now;
      next.outdated = next.outdated || (next.build !== "" && next.build !== message.build);
      next.build = next.build || message.build;
      next.version = message.version;
      break;
    case "operations.snapshot":
      next.operations = new Map(message.operations.map((operation) => [operation.jobID, operation]));
      next.operationsSeq = message.seq;
      break;
    case "operations.delta":
      next.operations = withChanges(copyOnWrite(next.operations, previous.operations), message.operations, new Set(message.partial));
      next.operationsSeq = Math.max(next.operationsSeq ?? 0, message.seq);
      break;
    case "nodes.snapshot":
      next.nodes = new Map(message.nodes.map((node) => [node.id, node]));
      next.nodesCursor = message.cursor;
      break;
    case "nodes.delta":
      next.nodes = patched(copyOnWrite(next.nodes, previous.nodes), message.changed, message.removed);
      next.nodesCursor = message.cursor;
      break;
    case "notices":
      next.notices = message.notices;
      break;
    case "backends":
      next.backends = message;
      break;
    case "rules":
      next.rules = message.revision;
      break;
    case "definitions":
      next.definitions = message.revision;
      break;
    case "alive":
      next.beats += 1;
      break;
  }
}

/** A map that this batch may write to: a copy the first time, the same one after that. */
function copyOnWrite<Value>(current: ReadonlyMap<string, Value>, previous: ReadonlyMap<string, Value>): Map<string, Value> {
  return current === previous ? new Map(current) : (current as Map<string, Value>);
}

/** `partial`: of these `nodes` has only the parts that changed. */
function withChanges(
  operations: Map<string, Operation>,
  changed: readonly Operation[],
  partial: ReadonlySet<string>,
): Map<string, Operation> {
  for (const operation of changed) {
    const current = operations.get(operation.jobID);
    if (current !== undefined && current.seq > operation.seq) continue;
    if (!partial.has(operation.jobID)) operations.set(operation.jobID, operation);
    else if (current !== undefined) operations.set(operation.jobID, withTargets(current, operation));
  }
  forget(operations);
  return operations;
}

/** The parts of an operation stay the same ones from its beginning. */
function withTargets(current: Operation, change: Operation): Operation {
  const moved = new Map(change.nodes?.map((target) => [target.node_id, target]));
  const nodes = current.nodes?.map((target) => moved.get(target.node_id) ?? target);
  return nodes === undefined ? change : { ...change, nodes };
}

/** Drops the oldest of what is only remembered: it may not grow while the page stays open. */
function forget(operations: Map<string, Operation>): void {
  const over = [...operations.values()].filter((operation) => !isActive(operation) && !needsAttention(operation));
  if (over.length <= ENDED_KEPT) return;
  over.sort((left, right) => left.seq - right.seq);
  for (const operation of over.slice(0, over.length - ENDED_KEPT)) operations.delete(operation.jobID);
}

function patched(
  nodes: Map<string, LiveNode>,
  changed: readonly LiveNodePatch[],
  removed: readonly string[],
): Map<string, LiveNode> {
  for (const patch of changed) nodes.set(patch.id, { ...nodes.get(patch.id), ...patch } as LiveNode);
  for (const id of removed) nodes.delete(id);
  return nodes;
}

/** Holds the state and notifies its listeners, at most once a frame. */
export class LiveStore {
  private state = EMPTY;
  private readonly waiting: FeedMessage[] = [];
  private readonly changes = new Listeners();
  private readonly frame = new NextFrame(() => this.set(apply(this.state, this.waiting.splice(0), Date.now())));

  readonly read = (): LiveState => this.state;

  readonly subscribe = this.changes.subscribe;

  /** Takes a message; it shows with the next frame. */
  push(message: FeedMessage): void {
    this.waiting.push(message);
    this.frame.request();
  }

  /** The feed is lost, or refused. */
  lost(connection: Exclude<Connection, "live">): void {
    // Messages before the end are shown first, or the page would show the feed as live afterwards.
    this.frame.now();
    const staleSince = this.state.staleSince ?? Date.now();
    this.set({ ...this.state, connection, staleSince });
  }

  private set(state: LiveState): void {
    if (state === this.state) return;
    this.state = state;
    this.changes.notify();
  }
}
