import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { changeAll } from "./installed-calls";

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
  await changeAll("upgrade", requests, true);
  await changeAll("upgrade", requests, false);
  await changeAll("delete", requests, true);
  const plain = [
    { backend: "a", nodes: ["n", "m"] },
    { backend: "b", nodes: ["n"] },
  ];
  const confirmed = plain.map((one, index) => ({ ...one, last_replicas: index === 1 ? ["chat"] : [] }));
  expect(sent()).toEqual([
    ["/api/backends/changes", { verb: "upgrade", backends: confirmed, waves: { canary: true, max_unavailable: 1 } }],
    ["/api/backends/changes", { verb: "upgrade", backends: plain }],
    ["/api/backends/changes", { verb: "delete", backends: plain }],
  ]);
});

it("a backend that fails does not keep the others back; last replicas are told apart (E49)", async () => {
  results = [{ backend: "a", jobID: "1" }, { backend: "b", error: "busy" }, { backend: "c", error: "the last one", last_replicas: ["chat"] }, { backend: "d", jobID: "2" }];
  const outcome = await changeAll(
    "upgrade",
    ["a", "b", "c", "d"].map((backend) => ({ backend, nodes: ["n"], lastReplicas: [] })),
    true,
  );
  expect(outcome.started).toEqual(["a", "d"]);
  expect([...outcome.failed].map(([backend, error]) => `${backend}: ${error.message}`)).toEqual(["b: busy"]);
  expect([...outcome.lastReplicas]).toEqual([["c", ["chat"]]]);
});
