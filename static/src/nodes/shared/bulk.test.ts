import { describe, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import type { Operation } from "../../live/messages";
import { LiveStore } from "../../live/store";
import { install } from "../../operations/fixtures";
import { follow, outcomesOf } from "./bulk";

const part = (id: string, status: "queued" | "success" | "error" | "cancelled", error?: string) => ({
  node_id: id, node_name: id, status, percentage: 0, ...(error === undefined ? {} : { error }),
});

function drains(seq: number, status: Operation["status"], ...nodes: ReturnType<typeof part>[]): Operation {
  return install("x", { jobID: "job", kind: "node_drain", isBackend: false, seq, status, nodes });
}

describe("a verb over many nodes (review R2)", () => {
  it("says of each node what the operation's part says", () => {
    const outcomes = outcomesOf(drains(1, "processing", part("a", "success"), part("b", "error", "no"), part("c", "queued"), part("d", "cancelled")));
    expect([...outcomes.values()].map(({ state }) => state)).toEqual(["done", "failed", "waiting", "stopped"]);
    expect(outcomes.get("b")?.error).toMatchObject({ message: "no", status: 409 });
  });

  it("is followed by the feed to its end", async () => {
    const store = new LiveStore();
    const seen: string[] = [];
    const done = follow(store, "job", (one) => seen.push(one.status), new AbortController().signal);
    store.push({ type: "operations.snapshot", seq: 1, operations: [drains(1, "processing", part("a", "queued"))] });
    await vi.waitFor(() => expect(seen).toEqual(["processing"]));
    store.push({ type: "operations.delta", seq: 2, operations: [drains(2, "completed", part("a", "success"))] });
    await done;
    expect(seen).toEqual(["processing", "completed"]);
  });

  it("is asked for when the feed does not tell it", async () => {
    vi.useFakeTimers();
    const ended = drains(3, "completed", part("a", "success"));
    vi.spyOn(client, "GET").mockResolvedValue({ data: ended, response: new Response() });
    const seen: string[] = [];
    const done = follow(new LiveStore(), "job", (one) => seen.push(one.status), new AbortController().signal);
    await vi.advanceTimersByTimeAsync(10_000);
    await done;
    expect(seen).toEqual(["completed"]);
    vi.useRealTimers();
  });

  it("is no longer followed when its dialog has gone, and nothing is sent", async () => {
    const control = new AbortController();
    const done = follow(new LiveStore(), "job", () => undefined, control.signal);
    control.abort();
    await done;
  });
});
