// The timeline's words, and how its pages are put together. Pure.
import { duration } from "../../lib/format";
import type { EventKind, NodeEvent } from "./data";

export const KINDS: Readonly<Record<EventKind, string>> = {
  registered: "Registered",
  approved: "Approved",
  rejected: "Rejected",
  drained: "Drain started",
  drain_ended: "Drain ended",
  resumed: "Resumed",
  deactivated: "Shut down",
  fell_silent: "Lost contact",
  heard_again: "Back online",
  silence_held: "Kept by the mass-disruption hold",
  marked_unhealthy: "Marked unhealthy",
  marked_healthy: "Marked healthy",
  deregistered: "Deregistered",
  override: "Override changed",
  labels: "Labels changed",
  conflict: "Identity conflict",
  conflict_accepted: "Conflict accepted",
  conflict_refused: "Conflict refused",
  rotation_requested: "Secret rotation requested",
  rotated: "Secret rotated",
  revoked: "Secret revoked",
  address_refused: "Address refused",
};

/** The events of the timeline, newest first, and the cursor of older ones, if there are any. */
export interface Timeline {
  events: readonly NodeEvent[];
  next: number | undefined;
}

interface Page {
  events: readonly NodeEvent[];
  next_cursor?: number;
}

/** The newest page laid over what is shown: repeated events count on, older ones stay where they were. */
export function withNewest(shown: Timeline | undefined, page: Page): Timeline {
  const fresh: Timeline = { events: page.events, next: page.next_cursor };
  const last = page.events.at(-1);
  const newestShown = shown?.events[0];
  if (shown === undefined || last === undefined || newestShown === undefined) return fresh;
  // More happened than a page holds: what lies between is not known, so the older ones are requested again.
  if (last.id > newestShown.id) return fresh;
  const older = shown.events.filter((event) => event.id < last.id);
  return { events: [...page.events, ...older], next: older.length > 0 ? shown.next : page.next_cursor };
}

/** An older page put below. */
export function withOlder(shown: Timeline | undefined, page: Page): Timeline {
  const shownIds = new Set(shown?.events.map((event) => event.id));
  return {
    events: [...(shown?.events ?? []), ...page.events.filter((event) => !shownIds.has(event.id))],
    next: page.next_cursor,
  };
}

/** The actor. */
export function actorWords(event: Pick<NodeEvent, "actor" | "actor_kind">): string {
  if (event.actor_kind === "worker") return "worker";
  if (event.actor_kind === "task") return `task ${event.actor}`;
  if (event.actor_kind === "static_key") return `${event.actor} (API key)`;
  if (event.actor_kind === "command") return `${event.actor} (command line)`;
  return event.actor;
}

const OVERRIDES: Readonly<Record<string, string>> = {
  max_replicas_per_model: "maximum replicas per model",
  vram_budget: "VRAM budget",
  disk_quota: "disk quota for models",
};
/** Said by the text beside them already. */
const IMPLIED = new Set(["vram_budget_bytes", "available_vram", "max_replicas_per_model_manually_set", "vram_budget_manually_set", "conflict"]);

/** The changes, one line each: `maximum replicas per model: 1 → 3`, `+ tier=fast`, `− zone`. */
export function changes(event: Pick<NodeEvent, "detail">): string[] {
  const detail = event.detail ?? {};
  return Object.entries(detail).flatMap(([name, value]) => {
    const previousValue = keptOverride(name);
    // Only the source of the value changes: the line names it all the same.
    return previousValue !== undefined && !(previousValue in detail) ? [OVERRIDES[previousValue] ?? previousValue] : change(name, value);
  });
}

/** The override that `name` is the mark of. */
function keptOverride(name: string): string | undefined {
  return Object.keys(OVERRIDES).find((override) => name === `${override}_manually_set`);
}

function change(name: string, value: unknown): string[] {
  if (IMPLIED.has(name)) return [];
  if (name === "set" && isRecord(value)) return Object.entries(value).map(([key, text]) => `+ ${key}=${plain(text)}`);
  if (name === "removed" && Array.isArray(value)) return value.map((key) => `− ${plain(key)}`);
  if (name === "deadline_seconds" && typeof value === "number") return [`deadline: ${duration(value) || `${value} s`}`];
  if (isRecord(value) && "from" in value && "to" in value) {
    return [`${OVERRIDES[name] ?? name}: ${plain(value["from"])} → ${plain(value["to"])}`];
  }
  return [`${name.replaceAll("_", " ")}: ${plain(value)}`];
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function plain(value: unknown): string {
  if (value === "" || value === null || value === undefined) return "none";
  if (typeof value === "string") return value;
  return typeof value === "number" || typeof value === "boolean" ? String(value) : JSON.stringify(value);
}
