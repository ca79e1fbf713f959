import { describe, expect, it } from "vitest";
import { safeNext, signInPath } from "./next";

const ORIGIN = "https://cluster.example";

describe("where signing in leads", () => {
  it.each(["/app", "/app/activity", "/app/nodes/n1?tab=labels#timeline"])("is %s if the page has it", (path) => {
    expect(safeNext(path, ORIGIN)).toBe(path);
  });

  it.each([
    "https://evil.example/app",
    "//evil.example/app",
    "/\\evil.example/app",
    "/\t/evil.example/app",
    "javascript:alert(1)",
    "/admin/",
    "/application",
    "/app/../admin/",
    "app/nodes",
    "",
    null,
  ])("is the start page for %s", (path) => {
    expect(safeNext(path, ORIGIN)).toBe("/app/nodes");
  });

  it("comes back with search and hash, and says nothing for the start page", () => {
    expect(signInPath({ pathname: "/app/nodes", search: "?state=pending", hash: "#x" })).toBe(
      "/login?next=%2Fapp%2Fnodes%3Fstate%3Dpending%23x",
    );
    expect(signInPath({ pathname: "/app/nodes", search: "", hash: "" })).toBe("/login");
  });
});
