import { describe, expect, it } from "vitest";
import type { LiveNode } from "../../live/messages";
import { menuOf, refusalOfAll } from "./actions";
import { waiting } from "./pending";
import { summed } from "./pulse";

function node(id: string, overrides: Partial<LiveNode> = {}): LiveNode {
  const empty = { rejected: null, revoked: null, drain: null, weak_identity: false, total_vram: 0, available_vram: 0 };
  return { id, name: id, node_type: "backend", status: "healthy", fingerprint: "ab", created_at: id, ...empty, ...overrides } as LiveNode;
}

const rejected = { at: "", by: "admin", reason: "not ours" };

describe("the pulse (E30)", () => {
  it("counts memory only where there is some", () => {
    const nodes = [node("a", { total_vram: 10, available_vram: 4 }), node("b", { status: "draining" }), node("c", { available_vram: 5 })];
    expect(summed(nodes)).toEqual({ nodes: 3, healthy: 2, draining: 1, usedVram: 6, totalVram: 10 });
  });
});

describe("what waits for a decision (E31, UW18)", () => {
  it("is pending and not rejected, the longest waiting first", () => {
    const nodes = [node("c", { status: "pending" }), node("b", { status: "pending", rejected }), node("a", { status: "pending" }), node("d")];
    expect(waiting(nodes).map((node) => node.id)).toEqual(["a", "c"]);
  });
});

describe("what is offered", () => {
  const labels = (node: LiveNode) => menuOf(node, () => undefined, () => undefined).map((item) => item.label);

  it("leaves out what a node cannot be asked now", () => {
    expect(labels(node("a"))).toEqual(["Open", "Drain…", "Label…", "Install…", "Remove…"]);
    expect(labels(node("a", { status: "pending" }))).toEqual(["Open", "Approve…", "Reject…", "Drain…", "Label…", "Install…", "Remove…"]);
  });

  it("says why a verb makes sense for none of the selected nodes", () => {
    expect(refusalOfAll("approve", [node("a"), node("b")])).toBe("Not possible for any selected node: already approved");
    expect(refusalOfAll("approve", [node("a"), node("b", { status: "pending" })])).toBe("");
    expect(refusalOfAll("install", [node("a", { status: "pending" }), node("b", { node_type: "agent" })])).toBe(
      "Not possible for any selected node",
    );
  });
});
