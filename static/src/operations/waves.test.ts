import { expect, it } from "vitest";
import { model, node } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { install } from "./fixtures";
import { lastReplicas, waveProgress, waitOf } from "./waves";

type Waves = NonNullable<Operation["waves"]>;

function upgrade(overrides: Partial<Waves> = {}, second: "queued" | "error" | "cancelled" = "queued"): Operation {
  const statuses = ["success" as const, second, "queued" as const, "queued" as const];
  const nodes = statuses.map((status, wave) => ({ node_id: "abcd"[wave] ?? "", node_name: "abcd"[wave] ?? "", status, percentage: 0, wave }));
  return install("a", { kind: "backend_upgrade", nodes, waves: { state: "running", open: 1, count: 4, canary: true, maxUnavailable: 1, lastReplicas: [], ...overrides } });
}

it("the canary is the first wave, and the others wait for the open one", () => {
  const now = waveProgress(upgrade());
  expect(now).toMatchObject({ number: 2, count: 4, isCanary: false });
  expect(now?.open.map((target) => target.node_name)).toEqual(["b"]);
  expect(now && waitOf(now)).toBe("2 nodes wait until wave 2 of 4 is done.");
  expect(waveProgress(upgrade({ open: 0 }))?.isCanary).toBe(true);
  expect(waveProgress(install("a"))).toBeNull();
});

it("after a failed wave the rest waits for a choice; after the last one nothing waits", () => {
  const [asks, last] = [waveProgress(upgrade({ state: "asks" }, "error")), waveProgress(upgrade({ open: 3 }))];
  expect(asks && waitOf(asks)).toBe("Wave 2 of 4 failed: 2 nodes wait for your decision.");
  const cancelled = waveProgress(upgrade({ state: "asks" }, "cancelled"));
  expect(cancelled && waitOf(cancelled)).toBe("Wave 2 of 4 was partly cancelled: 2 nodes wait for your decision.");
  expect(last && waitOf(last)).toBe("");
});

it("a last replica is one that no other healthy node serves and that is not confirmed", () => {
  const on = (name: string, ...models: string[]) => models.map((modelName, index) => model(modelName, index, { id: `${name}-${modelName}`, backend_type: "echo" }));
  const nodes = new Map([
    node("b", { models: on("b", "alone", "twice", "away", "confirmed") }),
    node("c", { models: on("c", "twice") }),
    node("d", { status: "offline", models: on("d", "away") }),
  ].map((node) => [node.id, node]));
  const operation = upgrade({ lastReplicas: ["confirmed"] });
  expect(lastReplicas(operation, waveProgress(operation)?.open ?? [], nodes)).toEqual(["alone", "away"]);
});

it("between two waves it says until when the pause lasts", () => {
  const operation = upgrade({ open: 0, pauseSeconds: 60 });
  const nodes = (operation.nodes ?? []).map((target, wave) => (wave === 1 ? { ...target, nextLookAt: "2026-08-22T10:00:00Z" } : target));
  const paused = waveProgress({ ...operation, nodes });
  expect(paused && waitOf(paused)).toMatch(/^Pause until .*00.*, then wave 2 of 4\.$/);
});
