import { describe, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import type { Operation } from "../../live/messages";
import { LiveStore } from "../../live/store";
import { install } from "../../operations/fixtures";
import { follow, outcomesOf } from "./bulk";

const target = (id: string, status: "queued" | "success" | "error" | "cancelled", error?: string) => ({
  node_id: id, node_name: id, status, percentage: 0, ...(error === undefined ? {} : { error }),
});

function drains(seq: number, status: Operation["status"], ...nodes: ReturnType<typeof target>[]): Operation {
  return install("x", { jobID: "job", kind: "node_drain", isBackend: false, seq, status, nodes });
}

describe("a verb over many nodes (review R2)", () => {
  it("says of each node what the operation's part says", () => {
    const outcomes = outcomesOf(drains(1, "processing", target("a", "success"), target("b", "error", "no"), target("c", "queued"), target("d", "cancelled")));
    expect([...outcomes.values()].map(({ state }) => state)).toEqual(["done", "failed", "waiting", "stopped"]);
    expect(outcomes.get("b")?.error).toMatchObject({ message: "no", status: 409 });
  });

  it("is followed by the feed to its end", async () => {
    const store = new LiveStore();
    const states: string[] = [];
    const done = follow(store, "job", (operation) => states.push(operation.status), new AbortController().signal);
    store.push({ type: "operations.snapshot", seq: 1, operations: [drains(1, "processing", target("a", "queued"))] });
    await vi.waitFor(() => expect(states).toEqual(["processing"]));
    store.push({ type: "operations.delta", seq: 2, operations: [drains(2, "completed", target("a", "success"))] });
    await done;
    expect(states).toEqual(["processing", "completed"]);
  });

  it("is asked for when the feed does not tell it", async () => {
    vi.useFakeTimers();
    const ended = drains(3, "completed", target("a", "success"));
    vi.spyOn(client, "GET").mockResolvedValue({ data: ended, response: new Response() });
    const states: string[] = [];
    const done = follow(new LiveStore(), "job", (operation) => states.push(operation.status), new AbortController().signal);
    await vi.advanceTimersByTimeAsync(10_000);
    await done;
    expect(states).toEqual(["completed"]);
    vi.useRealTimers();
  });

  it("is no longer followed when its dialog has gone, and nothing is sent", async () => {
    const control = new AbortController();
    const done = follow(new LiveStore(), "job", () => undefined, control.signal);
    control.abort();
    await done;
  });
});
