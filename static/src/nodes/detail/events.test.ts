import { describe, expect, it } from "vitest";
import type { NodeEvent } from "./data";
import { actorWords, changes, withNewest, withOlder, type Timeline } from "./events";

function page(ids: readonly number[], next?: number, count = 1) {
  const events = ids.map((id) => ({ id, count }) as NodeEvent);
  return next === undefined ? { events } : { events, next_cursor: next };
}

function ids(timeline: Timeline): number[] {
  return timeline.events.map((event) => event.id);
}

describe("pages of the timeline (UW15)", () => {
  const shown = withOlder(withNewest(undefined, page([6, 5], 5)), page([4, 3], 3));

  it("puts older pages below", () => {
    expect([ids(shown), shown.next]).toEqual([[6, 5, 4, 3], 3]);
  });

  it("lays the newest page on top and keeps the older ones", () => {
    const moved = withNewest(shown, page([7, 6], 6, 2));
    expect([ids(moved), moved.next]).toEqual([[7, 6, 5, 4, 3], 3]);
    expect(moved.events[1]?.count).toBe(2);
  });

  it("begins again when more has happened than a page holds", () => {
    const moved = withNewest(shown, page([9, 8], 8));
    expect([ids(moved), moved.next]).toEqual([[9, 8], 8]);
  });

  it("shows nothing twice, and ends", () => {
    const ended = withOlder(shown, page([3, 2]));
    expect([ids(ended), ended.next]).toEqual([[6, 5, 4, 3, 2], undefined]);
  });
});

describe("what an event says", () => {
  it("tells before and after of an override, once", () => {
    const detail = {
      max_replicas_per_model: { from: 1, to: 3 },
      max_replicas_per_model_manually_set: { from: false, to: true },
    };
    expect(changes({ detail })).toEqual(["maximum replicas per model: 1 → 3"]);
    expect(changes({ detail: { disk_quota: { from: "80%", to: "" } } })).toEqual(["disk quota for models: 80% → none"]);
    expect(changes({ detail: { vram_budget: { from: "", to: "80%" } } })).toEqual(["VRAM budget: none → 80%"]);
  });

  it("names an override whose value stays when it changes hands", () => {
    const detail = { max_replicas_per_model_manually_set: { from: true, to: false } };
    expect(changes({ detail })).toEqual(["maximum replicas per model"]);
  });

  it("tells labels that came and went", () => {
    expect(changes({ detail: { set: { tier: "fast" }, removed: ["zone"] } })).toEqual(["+ tier=fast", "− zone"]);
  });

  it("tells the rest by name", () => {
    expect(changes({ detail: { deadline_seconds: 600, in_flight: 2 } })).toEqual(["deadline: 10m 0s", "in flight: 2"]);
    expect(changes({})).toEqual([]);
  });

  it("tells who: a person, a key, a task, the worker", () => {
    const wordsOf = (actor_kind: string, actor: string) => actorWords({ actor_kind, actor });
    expect([wordsOf("user", "anna"), wordsOf("static_key", "admin"), wordsOf("task", "drains"), wordsOf("worker", "worker")]).toEqual([
      "anna",
      "admin (API key)",
      "task drains",
      "worker",
    ]);
  });
});
