import { cleanup, fireEvent, screen } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { ChangesPage } from "./changes";

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

const CHANGE = { id: 9, at: "2026-08-22T10:00:00Z", kind: "node.drained", actor_kind: "user", actor: "anna", address: "10.0.0.7", request_id: "", subject: "gpu-1", subject_id: "n1", detail: "disk" };

it("says who changed what and from where, and asks for older changes by the cursor", async () => {
  const addresses: string[] = [];
  vi.stubGlobal("fetch", (request: Request) => {
    const query = new URL(request.url).searchParams;
    addresses.push(query.toString());
    const older = { ...CHANGE, id: 4, kind: "operation.cancelled", subject: "backend install of echo", subject_id: "o1", address: "", detail: "" };
    const body = query.has("cursor") ? { entries: [older] } : { entries: [CHANGE], nextCursor: 9 };
    return Promise.resolve(new Response(JSON.stringify(body), { status: 200, headers: { "Content-Type": "application/json" } }));
  });
  const routes = [{ path: "/app/activity/changes", element: <ChangesPage /> }];
  stage(new LiveStore(), createMemoryRouter(routes, { initialEntries: ["/app/activity/changes?kind=node"] }));
  const node = await screen.findByRole("link", { name: "gpu-1" });
  expect(node.getAttribute("href")).toBe("/app/nodes/n1");
  expect(node.closest("li")?.textContent).toContain("drained: diskanna from 10.0.0.7");
  fireEvent.click(screen.getByRole("button", { name: "Older" }));
  const operation = await screen.findByRole("link", { name: "backend install of echo" });
  expect(operation.closest("li")?.textContent).toContain("at the command line");
  expect(addresses).toEqual(["kind=node", "kind=node&cursor=9"]);
});
