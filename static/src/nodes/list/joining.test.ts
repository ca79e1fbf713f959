import { describe, expect, it } from "vitest";
import { node } from "../../live/fixtures";
import { checks, isConnected, isLoopback, joined, usesProblem, type Check } from "./joining";

const JOINED = { token: "t1", note: "", by: "root" };

function check(id: Check["id"], ...of: Parameters<typeof node>): Check {
  return checks(node(...of)).find((check) => check.id === id) as Check;
}

it("the nodes of a token, the first one first", () => {
  const late = node("late", { joined: JOINED, created_at: "2026-08-22T11:00:00Z" });
  const otherNode = node("other", { joined: { ...JOINED, token: "t2" } });
  expect(joined([late, node("none"), otherNode, node("early", { joined: JOINED })], "t1").map((node) => node.name)).toEqual(["early", "late"]);
});

it.each(["0", "", "1.5", "x", "1001"])("%s is no number of machines", (text) => {
  expect(usesProblem(text)).not.toBe("");
});

describe("what works on a machine that joins", () => {
  it("waits for the approval, and begins with commands after it", () => {
    expect(check("approved", "n", { status: "pending" }).state).toBe("waiting");
    expect(check("bus", "n", { status: "pending" }).advice).toBe("Starts after the approval.");
    expect(check("approved", "n").state).toBe("ok");
  });

  it("says who rejected it", () => {
    const rejected = { at: "2026-08-22T11:00:00Z", by: "anna", reason: "unknown" };
    expect(check("approved", "n", { status: "pending", rejected })).toMatchObject({ state: "failed", advice: "Rejected by anna." });
  });

  it("a registration is no heartbeat", () => {
    expect(check("heartbeat", "n").state).toBe("waiting");
    expect(check("heartbeat", "n", { last_heartbeat: "2026-08-22T10:00:05Z" }).state).toBe("ok");
    expect(check("heartbeat", "n", { status: "offline", reason: "silent" })).toMatchObject({ state: "failed", advice: "silent" });
  });

  it("an answer to a command says that the bus is reachable, a failed question why not", () => {
    expect(check("bus", "n").state).toBe("waiting");
    expect(check("bus", "n", { inventory_error: "no answer" }).advice).toContain("no answer. Check that the worker reaches the message bus");
    expect(check("bus", "n", { inventory_at: "2026-08-22T10:00:05Z", inventory_error: "no answer" }).state).toBe("ok");
    expect(isConnected(node("n", { inventory_at: "2026-08-22T10:00:05Z" }))).toBe(true);
    expect(isConnected(node("n", { inventory_at: "2026-08-22T10:00:05Z", status: "pending" }))).toBe(false);
  });

  it("an address that only the machine itself can reach is called out", () => {
    const addresses = { address: "127.0.0.1:50051", source_address: "192.0.2.7" };
    expect(check("address", "n", addresses)).toMatchObject({ state: "failed" });
    expect(check("address", "n", { ...addresses, source_address: "127.0.0.1" }).state).toBe("waiting");
    expect(check("address", "n", { source_address: "192.0.2.7" }).advice).toContain("connects from 192.0.2.7");
    expect(check("address", "n", { model_count: 1 }).state).toBe("ok");
    const port = { error: "its file port does not answer: connection refused", since: "2026-08-22T10:00:00Z", next_check_at: null };
    expect(check("address", "n", { file_port: port })).toMatchObject({ state: "failed" });
  });
});

it.each([
  ["localhost", true], ["127.0.0.1", true], ["[::1]", true], ["::ffff:127.0.0.1", true], ["10.0.0.1", false], ["127.example", false],
])("%s is a loopback: %s", (host, expected) => {
  expect(isLoopback(host)).toBe(expected);
});
