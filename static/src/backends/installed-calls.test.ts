import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { ApiError, client, explain } from "../api/client";
import { change, changeAll } from "./installed-calls";

const sent = () => (vi.mocked(client.POST).mock.calls as unknown as [string, { body: object }][]).map(([path, { body }]) => [path, body]);

beforeEach(() => {
  vi.spyOn(client, "POST").mockImplementation((() => Promise.resolve({ data: {}, response: new Response() })) as never);
});
afterEach(() => {
  vi.restoreAllMocks();
});

it("several nodes are one request, and only an upgrade goes in waves", async () => {
  const request = { backend: "a", nodes: ["n", "m"] };
  await change("upgrade", request, true);
  await change("upgrade", request, true, ["chat"]);
  await change("upgrade", request, false, ["chat"]);
  await change("reinstall", request, true);
  await change("delete", request, true);
  const [nodes, waves] = [["n", "m"], { canary: true, max_unavailable: 1 }];
  expect(sent()).toEqual([
    ["/api/backends/upgrade/{name}", { nodes, waves }],
    ["/api/backends/upgrade/{name}", { nodes, waves, last_replicas: ["chat"] }],
    ["/api/backends/upgrade/{name}", { nodes }],
    ["/api/backends/install/{name}", { nodes, force: true }],
    ["/api/backends/delete/{name}", { nodes }],
  ]);
});

it("a backend that fails does not keep the others back; last replicas are told apart (E49)", async () => {
  const refused = explain({ error: "the last one", field: "last_replicas", last_replicas: ["chat"] }, new Response(null, { status: 409 }));
  const answers: Record<string, Error> = { b: new ApiError("busy", 409), c: refused };
  const requests = ["a", "b", "c", "d"].map((backend) => ({ backend, nodes: ["n"] }));
  const outcome = await changeAll(requests, ({ backend }) => (answers[backend] === undefined ? Promise.resolve() : Promise.reject(answers[backend])));
  expect(outcome.started).toEqual(["a", "d"]);
  expect([...outcome.failed].map(([backend, error]) => `${backend}: ${error.message}`)).toEqual(["b: busy"]);
  expect([...outcome.lastReplicas]).toEqual([["c", ["chat"]]]);
});
