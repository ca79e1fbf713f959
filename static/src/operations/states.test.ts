import { describe, expect, it } from "vitest";
import type { Operation, OperationTarget } from "../live/messages";
import { effectOf } from "./cancel";
import { at, byJob, install } from "./fixtures";
import { groups, targetsOf } from "./model";
import { Paces, targetKey } from "./pace";
import { headline, subjectOf, where } from "./summary";
import { tally } from "./tally";
import { stateOf } from "./words";

type Target = Partial<OperationTarget> & { status: OperationTarget["status"] };

function onMany(status: Operation["status"], ...targets: Target[]): Operation {
  const nodes = targets.map((target, n) => ({ node_id: `n${n}`, node_name: `gpu-${n}`, percentage: 0, ...target }));
  return install("many", { status, message: "0 of 3 nodes done", nodes });
}

const OVERDUE = { status: "running_on_worker", overdueSince: at(1), reason: "node gpu-0 has not answered" } as const;
const RETRYING = { status: "queued", attempts: 2, reason: "no space left", error: "no space left", nextLookAt: at(60) } as const;
const ABSENT = { status: "queued", reason: "node gpu-1 is offline", error: "node gpu-1 is offline" } as const;
const QUEUED = { status: "queued", reason: "queued" } as const;
const BUSY = { status: "running_on_worker" } as const;

describe("a part of an operation on several nodes (UW24, UW25)", () => {
  it.each<[Target, string]>([
    [QUEUED, "queued"],
    [ABSENT, "waiting"],
    [RETRYING, "retrying"],
    // After an attempt its node went away: it waits for the node, not for a time.
    [{ ...ABSENT, attempts: 1 }, "waiting"],
    [{ status: "downloading" }, "downloading"],
    [BUSY, "running"],
    [OVERDUE, "overdue"],
    // The command is repeated; the worker may still be at the first one.
    [{ ...OVERDUE, status: "queued" }, "overdue"],
    [{ status: "superseded", reason: "replaced" }, "superseded"],
    [{ status: "cancelled" }, "cancelled"],
  ])("says of itself how it is, apart from the others: %j", (target, status) => {
    expect(targetsOf(onMany("processing", target, BUSY))[0]?.status).toBe(status);
  });

  it("has an error only when it failed: the reason of a wait is none", () => {
    const [failed, waits] = targetsOf(onMany("processing", { status: "error", error: "no room" }, RETRYING));
    expect([failed?.error, waits?.error, waits?.reason]).toEqual(["no room", "", "no space left"]);
  });

  it("that was cancelled stays so when the others succeed", () => {
    expect(targetsOf(onMany("completed", { status: "success" }, { status: "cancelled" })).map((target) => target.status)).toEqual(["success", "cancelled"]);
  });

  it("is counted by how it is, worst first", () => {
    const targets = targetsOf(onMany("processing", BUSY, { status: "error" }, { status: "success" }, OVERDUE, RETRYING, ABSENT));
    expect(tally(targets)).toBe("1 failed · 1 running on the worker · 1 retrying · 1 waiting · 1 running · 1 done");
  });
});

describe("an operation (issue 11, honest states)", () => {
  it("says of the last node that is left what it does, not that the whole is starting", () => {
    const [group] = groups([onMany("processing", { status: "success" }, { status: "downloading", phase: "downloading", percentage: 40 })], new Map());
    expect(group && subjectOf(group)).toBe("downloading");
  });

  it("runs on the worker when nothing else of it is left (O19)", () => {
    expect(stateOf(onMany("processing", { status: "success" }, OVERDUE))).toBe("overdue");
    expect(stateOf(onMany("processing", BUSY, OVERDUE))).toBe("running");
  });

  it.each<[Target[], string]>([
    [[QUEUED, ABSENT], "queued"],
    [[RETRYING, ABSENT], "retrying"],
    [[ABSENT, ABSENT], "waiting"],
  ])("that has not begun waits as its parts do: %j", (targets, state) => {
    expect(stateOf(onMany("pending", ...targets))).toBe(state);
  });

  it("that is retried says so, with its last error", () => {
    const [group] = groups([install("a", { status: "pending", message: "no space left", attempts: 2 }, RETRYING)], new Map());
    expect(group && [headline(group), subjectOf(group)]).toEqual(["Retrying to install backend", "no space left"]);
  });

  it("that failed names the nodes that failed, not those that are done", () => {
    const failed = onMany("failed", { status: "success" }, { status: "error", error: "no room" });
    const [group] = groups([failed], new Map());
    expect(group && where(group)).toBe("on gpu-1");
  });

  it("counts failed nodes while the others run", () => {
    const [group] = groups([onMany("processing", { status: "success" }, { status: "error" }, BUSY)], new Map());
    expect(group && where(group)).toBe("1 of 3 nodes, 1 failed");
  });
});

describe("the pace of an operation on several nodes", () => {
  const moved = (seconds: number, queued: boolean) => {
    const target = (n: number, rate: number) => ({ node_id: `n${n}`, node_name: `gpu-${n}`, status: "downloading" as const, percentage: 1, current_bytes: rate * seconds, total_bytes: 1000 });
    const otherTargets = queued ? [{ node_id: "n9", node_name: "gpu-9", status: "queued" as const, percentage: 0 }] : [];
    return install("many", { nodes: [target(0, 10), target(1, 20), ...otherTargets], currentBytes: 30 * seconds });
  };
  const after = (queued: boolean) => {
    const paces = new Paces();
    for (const second of [1, 2, 3, 4, 5]) paces.observe(byJob(moved(second, queued)), 1000 * second);
    return paces;
  };

  it("is each part's own, and their sum; it ends with its slowest part", () => {
    const paces = after(false);
    const last = moved(5, false);
    expect(new Map(paces.ofTargets(last, 5000)).get(targetKey(last, "n1"))).toEqual({ rate: 20, secondsLeft: 45 });
    expect(paces.of(last, 5000)).toEqual({ rate: 30, secondsLeft: 95 });
  });

  it("has no end while a part has not begun", () => {
    expect(after(true).of(moved(5, true), 5000)).toEqual({ rate: 30, secondsLeft: null });
  });
});

describe("a cancellation (UW27)", () => {
  it("says what each worker makes of it: only ours can be told to stop", () => {
    const targets = targetsOf(onMany("processing", BUSY, OVERDUE, ABSENT, { status: "success" }, RETRYING));
    const nodes = new Map([["n0", { weak_identity: false }], ["n1", { weak_identity: true }]]);
    expect(effectOf(targets, nodes)).toEqual({ ours: ["gpu-0"], stock: ["gpu-1"], others: false, waiting: 2, done: 1 });
  });

  it("says nothing of workers where none works on a backend: an import, a node's drain, a node that is gone", () => {
    const nodes = new Map([["n0", { weak_identity: true }]]);
    const running = [
      install("", { kind: "model_import", isBackend: false, nodeID: "", nodes: [] }),
      install("n0", { kind: "node_drain", isBackend: false }),
      install("gone"),
    ];
    for (const operation of running) expect(effectOf(targetsOf(operation), nodes)).toEqual({ ours: [], stock: [], others: true, waiting: 0, done: 0 });
  });
});
