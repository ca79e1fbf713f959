import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { changeAll } from "./installed-calls";

const QUARTERS = { canary: true, max_unavailable: "25%", pause_seconds: 60, stop_at_failures: 2 };

let results: object[];
const sent = () => (vi.mocked(client.POST).mock.calls as unknown as [string, { body: object }][]).map(([path, { body }]) => [path, body]);

beforeEach(() => {
  results = [];
  vi.spyOn(client, "POST").mockImplementation((() => Promise.resolve({ data: { results }, response: new Response() })) as never);
});
afterEach(() => {
  vi.restoreAllMocks();
});

it("several backends and nodes are one request, and only an upgrade goes in waves (review R2)", async () => {
  const requests = [
    { backend: "a", nodes: ["n", "m"], lastReplicas: [] },
    { backend: "b", nodes: ["n"], lastReplicas: ["chat"] },
  ];
  await changeAll("upgrade", requests, QUARTERS);
  await changeAll("upgrade", requests, null);
  await changeAll("delete", requests, null);
  const plain = [
    { backend: "a", nodes: ["n", "m"] },
    { backend: "b", nodes: ["n"] },
  ];
  const confirmed = plain.map((one, index) => ({ ...one, last_replicas: index === 1 ? ["chat"] : [] }));
  expect(sent()).toEqual([
    ["/api/backends/changes", { verb: "upgrade", backends: confirmed, waves: QUARTERS }],
    ["/api/backends/changes", { verb: "upgrade", backends: plain }],
    ["/api/backends/changes", { verb: "delete", backends: plain }],
  ]);
});

it("tells apart what has started, what was refused and why, and what was held back (E49)", async () => {
  results = [{ backend: "a", jobID: "1" }, { backend: "b", error: "busy" }, { backend: "c", error: "the last one", last_replicas: ["chat"] }, { backend: "d", jobID: "2" }, { backend: "e", error: "node n is draining", refusals: [{ node_id: "n", node_name: "n", reason: "node n is draining" }] }, { backend: "f" }];
  const outcome = await changeAll(
    "upgrade",
    ["a", "b", "c", "d", "e", "f"].map((backend) => ({ backend, nodes: ["n"], lastReplicas: [] })),
    QUARTERS,
  );
  expect(outcome.started).toEqual(["a", "d"]);
  expect([...outcome.failed].map(([backend, error]) => `${backend}: ${error.message}`)).toEqual(["b: busy"]);
  expect([...outcome.lastReplicas]).toEqual([["c", ["chat"]]]);
  expect([...outcome.refused]).toEqual([["e", [{ id: "n", name: "n", reason: "node n is draining" }]]]);
});
