import { describe, expect, it } from "vitest";
import { ApiError } from "../api/client";
import type { LiveNode } from "../live/messages";
import { install } from "../operations/fixtures";
import { canInstall, matches, eligibility, progressOf, tally, underWayFor } from "./picker-model";

function node(overrides: Partial<LiveNode> = {}): LiveNode {
  return { id: "gpu-1", name: "gpu-1", node_type: "backend", status: "healthy", backends: [], labels: {}, ...overrides } as LiveNode;
}

const ACCEPTED = { step: "accepted", jobID: "job-gpu-1", at: 0 } as const;

describe("before the press", () => {
  it.each([
    [{}, "install"],
    [{ status: "draining" }, "refused"],
    [{ status: "unhealthy" }, "install"],
    [{ status: "offline" }, "waits"],
    [{ status: "pending" }, "refused"],
    [{ node_type: "agent" }, "refused"],
    [{ backends: ["Echo"] }, "there"],
    [{ status: "offline", backends: ["echo"] }, "there"],
  ] as const)("a node %o would say %s", (overrides, kind) => {
    const expected = eligibility(node(overrides as Partial<LiveNode>), "localai@echo", undefined);
    expect(expected.kind).toBe(kind);
    expect(expected.text).not.toBe("");
    expect(canInstall(expected)).toBe(kind === "install" || kind === "waits");
  });

  it("joins what is being installed, and refuses beside another operation on it", () => {
    expect(eligibility(node(), "echo", install("gpu-1")).kind).toBe("joins");
    expect(eligibility(node(), "echo", install("gpu-1", { kind: "backend_delete" })).kind).toBe("refused");
  });

  it("knows what is under way by the plain name", () => {
    const operations = [install("a", { name: "echo" }), install("b", { name: "other" }), install("c", { status: "completed" })];
    expect([...underWayFor("localai@echo", operations).keys()]).toEqual(["a"]);
  });

  it("knows the nodes of one operation on many, and how each of them goes (review R2)", () => {
    const target = (id: string, status: "queued" | "downloading" | "success" | "error") => ({ node_id: id, node_name: id, status, percentage: 30, ...(status === "error" ? { error: "no space left" } : {}) });
    const many = install("x", { nodes: [target("a", "downloading"), target("b", "success"), target("c", "error"), target("d", "queued")] });
    expect([...underWayFor("echo", [{ ...many, name: "echo" }]).keys()]).toEqual(["a", "d"]);
    const results = ["a", "b", "c", "d"].map((id) => progressOf(ACCEPTED, many, undefined, id));
    expect(results.map(({ word, ended }) => [word, ended])).toEqual([["Installing", "no"], ["Installed", "well"], ["Failed", "badly"], ["Queued", "no"]]);
    expect(results[0]?.value).toBe(30);
    expect(results[2]?.detail).toBe("no space left");
  });

  it("finds nodes by name and by label", () => {
    const labelled = node({ labels: { Zone: "Rack-2" } });
    expect([matches(labelled, "GPU"), matches(labelled, "zone=rack"), matches(labelled, "zone=x"), matches(labelled, "rack")]).toEqual([
      true, true, false, false,
    ]);
  });
});

describe("after the press", () => {
  it("what was cancelled is neither installed nor still under way (A34)", () => {
    const cancelled = progressOf(ACCEPTED, install("gpu-1", { status: "cancelled" }), undefined);
    expect(cancelled).toMatchObject({ word: "Cancelled", ended: "badly", value: null });
  });

  it("a row turns by the server's word only, however long ago it was sent (A36, H13)", () => {
    expect(progressOf({ ...ACCEPTED, at: -1e12 }, install("gpu-1", { progress: 1 }), undefined).ended).toBe("no");
    expect(progressOf({ ...ACCEPTED, at: -1e12 }, undefined, new ApiError("", 504)).ended).toBe("no");
    expect(progressOf({ step: "sending" }, undefined, undefined)).toMatchObject({ word: "Sending", ended: "no" });
    expect(progressOf(ACCEPTED, undefined, undefined)).toMatchObject({ word: "Sent", ended: "no" });
    expect(progressOf(ACCEPTED, install("gpu-1", { progress: 42 }), undefined)).toMatchObject({ word: "Installing", value: 42 });
    expect(progressOf(ACCEPTED, install("gpu-1", { status: "completed" }), undefined).ended).toBe("well");
  });

  it("waiting is amber, never failed or installed (UW24)", () => {
    const waits = install("gpu-1", { status: "waiting_for_nodes", message: "node gpu-1 is offline" });
    expect(progressOf(ACCEPTED, waits, undefined)).toMatchObject({ tone: "warn", detail: "node gpu-1 is offline", ended: "no" });
  });

  it("gives the reason of a failure in text, and how to go on after a refusal", () => {
    const failed = install("gpu-1", { status: "failed", error: "no space left" });
    expect(progressOf(ACCEPTED, failed, undefined)).toMatchObject({ word: "Failed", detail: "no space left" });
    const error = new ApiError("too many requests", 429, "", "", 30);
    expect(progressOf({ step: "refused", error }, undefined, undefined).detail).toBe("too many requests. Try again in 30 s.");
  });

  it("believes the record when the feed no longer names a job (A34)", () => {
    const job = { progress: 100, message: "", state: "running" as const, galleryElementName: "echo", processed: true, deletion: false, queued: false };
    expect(progressOf(ACCEPTED, undefined, { ...job, completed: true }).ended).toBe("well");
    expect(progressOf(ACCEPTED, undefined, { ...job, error: "disk" })).toMatchObject({ word: "Failed", detail: "disk" });
    expect(progressOf(ACCEPTED, undefined, job).word).toBe("Cancelled");
    expect(progressOf(ACCEPTED, undefined, new ApiError("gone", 404)).ended).toBe("badly");
    expect(progressOf(ACCEPTED, undefined, new ApiError("", 500)).ended).toBe("no");
  });

  it("counts what is done and what failed", () => {
    const rows = ["completed", "failed", "processing"] as const;
    expect(tally(rows.map((status) => progressOf(ACCEPTED, install("a", { status }), undefined)))).toBe("1 of 3 done, 1 failed");
  });
});
