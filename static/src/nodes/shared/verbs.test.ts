import { describe, expect, it } from "vitest";
import type { LiveNode } from "../../live/messages";
import { keyProblem, listedLabels, written } from "./labels";
import { refusal, type Verb } from "./verbs";

function node(overrides: Partial<LiveNode>): LiveNode {
  const empty = { rejected: null, revoked: null, drain: null, rotation_requested_at: null, weak_identity: false };
  return { id: "a", name: "a", node_type: "backend", status: "healthy", fingerprint: "ab", ...empty, ...overrides } as LiveNode;
}

const DRAIN = { since: "", by: "admin", reason: "", own: false, deadline: null, engines_gone_at: null, engines_error: "" };

describe("which verbs make sense (R1.15 to R1.19)", () => {
  it.each<[Partial<LiveNode>, Verb[]]>([
    [{}, ["drain", "stop", "label", "install", "rotate", "revoke", "deregister"]],
    [{ status: "pending" }, ["approve", "reject", "label", "rotate", "revoke", "deregister"]],
    [{ status: "pending", fingerprint: "" }, ["reject", "label", "deregister"]],
    [{ status: "draining", drain: DRAIN }, ["resume", "stop", "label", "install", "rotate", "revoke", "deregister"]],
    [{ status: "draining", drain: { ...DRAIN, own: true } }, ["drain", "resume", "stop", "label", "install", "rotate", "revoke", "deregister"]],
    [{ status: "offline" }, ["drain", "resume", "label", "install", "rotate", "revoke", "deregister"]],
    [{ node_type: "agent", fingerprint: "", weak_identity: true }, ["drain", "label", "revoke", "deregister"]],
  ])("of %j: %j", (overrides, expected) => {
    const allVerbs: Verb[] = ["approve", "reject", "drain", "resume", "stop", "label", "install", "rotate", "revoke", "deregister"];
    expect(allVerbs.filter((verb) => refusal(verb, node(overrides)) === "")).toEqual(expected);
  });
});

describe("labels", () => {
  it.each([
    ["zone", ""],
    ["a/b", ""],
    ["", "Enter a key."],
    ["a/../b", "A key must not contain . or .. as a path segment"],
    ["k".repeat(129), "A key can have at most 128 characters."],
  ])("the key %s: %s", (key, expected) => expect(keyProblem(key)).toBe(expected));

  it("writes them as one word", () => expect([written("a", "b"), written("a", "")]).toEqual(["a=b", "a"]));
});

it("the node's page and Scheduling list the same labels (UI-4.13, review R14)", () => {
  expect(listedLabels({ labels: { zone: "b", "node.replica-slots": "2", "gpu.vendor": "nvidia" } })).toEqual([["gpu.vendor", "nvidia"], ["zone", "b"]]);
});
