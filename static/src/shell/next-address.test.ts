import { describe, expect, it } from "vitest";
import { safeNext, signInPath } from "./next-address";

const ORIGIN = "https://cluster.example";

describe("where signing in leads", () => {
  it.each(["/app", "/app/activity", "/app/nodes/n1?tab=labels#timeline"])("is %s if the page has it", (path) => {
    expect(safeNext(path, ORIGIN)).toEqual({ path, load: false });
  });

  it.each(["/admin/", "/admin/nodes/backendnode/?status=pending#x", "/api/docs", "/api/docs?a=b"])(
    "is loaded again for %s, a page of the server",
    (path) => {
      expect(safeNext(path, ORIGIN)).toEqual({ path, load: true });
    },
  );

  it.each([
    "https://evil.example/app",
    "//evil.example/app",
    "/\\evil.example/app",
    "/\t/evil.example/app",
    "javascript:alert(1)",
    "https:/admin/",
    "//evil.example/admin/",
    "/\\evil.example/admin/",
    "\\\\evil.example/admin/",
    "/\n/evil.example/admin/",
    "//evil.example\\@cluster.example/admin/",
    "/%5c/evil.example/app",
    "/application",
    "/admin",
    "/administration/",
    "/admin/../api/nodes",
    "/admin/%2e%2e/api/nodes",
    "/api/docs/../nodes",
    "/api/docsx",
    "/api/nodes",
    "/static/x.svg",
    "/login?next=/login",
    "app/nodes",
    "",
    null,
  ])("is the start page for %s", (path) => {
    expect(safeNext(path, ORIGIN)).toEqual({ path: "/app/overview", load: false });
  });

  it("comes back with search and hash, and says nothing for the start page", () => {
    expect(signInPath({ pathname: "/app/nodes", search: "?state=pending", hash: "#x" })).toBe(
      "/login?next=%2Fapp%2Fnodes%3Fstate%3Dpending%23x",
    );
    expect(signInPath({ pathname: "/app/overview", search: "", hash: "" })).toBe("/login");
  });
});
