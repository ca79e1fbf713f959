import { describe, expect, it } from "vitest";
import type { LiveNode, Operation } from "../../live/messages";
import type { NodeDetail } from "./data";
import { by, concerns, conditions, confirmationWord, drainLeft, provenance } from "./words";

const AT = "2026-01-01T00:00:00Z";

function node(target: Partial<LiveNode> = {}): LiveNode {
  const plain = { status: "healthy", rejected: null, revoked: null, drain: null, created_at: AT, models: [], in_flight_count: 0, file_port: null };
  return { ...plain, ...target } as LiveNode;
}

describe("provenance (UW14, UW17)", () => {
  it("tells the worker from a person", () => {
    expect([by("worker"), by("anna"), by("")]).toEqual(["by the worker", "by anna", ""]);
  });

  it("says whose value holds, also when the timeline has forgotten who set it", () => {
    expect(provenance(undefined, false)).toBe("Worker default");
    expect(provenance({ by: "anna" }, true)).toBe("Set by anna");
    expect(provenance({ by: "" }, true)).toBe("Set by an administrator");
  });

  it("lists what holds, worst first", () => {
    const drain = { since: AT, by: "anna", reason: "fan", own: false, deadline: null, engines_gone_at: null, engines_error: "" };
    const detail = { approval: { at: AT, by: "bob", reason: "" }, offline: { at: AT, by: "silence", reason: "no heartbeat" } };
    const result = conditions(node({ drain }), detail as NodeDetail);
    expect(result.map(({ id, by: actor, reason }) => [id, actor, reason])).toEqual([
      ["approval", "by bob", ""],
      ["offline", "by silence", "no heartbeat"],
      ["drain", "by anna", "fan"],
    ]);
  });

  it("names a file port that does not answer, with the next check, and gives draining its one colour (review R4, R14)", () => {
    const drain = { since: AT, by: "anna", reason: "", own: false, deadline: null, engines_gone_at: null, engines_error: "" };
    const port = { error: "its file port 10.0.0.1:50050 does not answer: connection refused", since: AT, next_check_at: "2026-01-01T00:05:00Z" };
    const result = conditions(node({ drain, file_port: port }), undefined);
    expect(result.map(({ id, tone }) => [id, tone])).toEqual([["approval", "good"], ["file-port", "bad"], ["drain", "info"]]);
    expect(result[1]).toMatchObject({ title: "File port unreachable", at: AT, reason: port.error, next: port.next_check_at });
  });

  it("shows a pending node's no before that it waits", () => {
    const rejected = { at: AT, by: "anna", reason: "not ours" };
    const result = conditions(node({ status: "pending", rejected }), undefined);
    expect(result.map((condition) => condition.title)).toEqual(["Rejected", "Awaiting approval"]);
  });
});

describe("a drain (UW16)", () => {
  const drain = { since: AT, by: "anna", reason: "", own: false, deadline: null, engines_gone_at: AT, engines_error: "" };
  const models = [{}] as LiveNode["models"];

  it("counts down, and says when the machine may be turned off", () => {
    expect(drainLeft(node({ drain, models, in_flight_count: 2 }), 0)?.text).toBe("2 requests in flight, 1 replica left");
    expect(drainLeft(node({ drain }), 0)).toEqual({ safe: true, text: "Safe to power off" });
  });

  it("does not say so before the worker has confirmed that no engine runs there", () => {
    const drainRequest = { ...drain, engines_gone_at: null };
    expect(drainLeft(node({ drain: drainRequest }), 0)).toEqual({
      safe: false,
      text: "No replicas left; stopping engines",
    });
    const stock = { ...drainRequest, engines_error: "the worker cannot report its running engines" };
    expect(drainLeft(node({ drain: stock }), 0)).toEqual({
      safe: false,
      text: "No replicas left; stop not confirmed: the worker cannot report its running engines",
    });
    expect(drainLeft(node({ drain: drainRequest, status: "offline" }), 0)?.text).toContain("stop not confirmed: the node is offline");
  });

  it("does not say so while an operation goes on there", () => {
    expect(drainLeft(node({ drain }), 1)?.safe).toBe(false);
  });

  it("is not said of a node that is not drained, or never let in", () => {
    expect([drainLeft(node(), 0), drainLeft(node({ drain, status: "pending" }), 0)]).toEqual([null, null]);
  });
});

describe("the word that is typed before something is lost (UW19)", () => {
  const id = "0f3a9c1b-0000-4000-8000-000000000000";

  it.each(["gpu-1", "rack 7 (left)"])("is the name: %s", (name) => {
    expect(confirmationWord({ id, name })).toBe(name);
  });

  it.each(["🦊", "עברית", "x".repeat(255), "two  blanks", "naïve"])("is the id's beginning for %s", (name) => {
    expect(confirmationWord({ id, name })).toBe("0f3a9c1b");
  });
});

it("finds a node's operations, alone or among others", () => {
  expect(concerns({ nodeID: "a" } as Operation, "a")).toBe(true);
  expect(concerns({ nodes: [{ node_id: "a" }] } as Operation, "a")).toBe(true);
  expect(concerns({ nodeID: "b", nodes: [{ node_id: "c" }] } as Operation, "a")).toBe(false);
});
