import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { model, node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { install } from "../operations/fixtures";
import { BackendsPage } from "./page";

const CATALOGUE = { backends: [], galleryErrors: [], repositories: [{}], preferDevelopmentBackends: false };
const PLACES = ["a", "b"].map((id) => ({ node_id: id, node_name: id, node_status: "healthy", version: "1", size: 1024 }));
let answers: Record<string, unknown>;

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", class { observe() {} unobserve() {} disconnect() {} });
  answers = {
    "/api/backends": CATALOGUE,
    "/backends": [{ Name: "echo", RunFile: "", IsMeta: false, IsSystem: false, Metadata: { name: "echo", gallery_url: "file:///g" }, nodes: PLACES }],
    "/api/backends/upgrades": {},
  };
  vi.spyOn(client, "GET").mockImplementation(((path: string) => Promise.resolve({ data: answers[path], response: new Response() })) as never);
  vi.spyOn(client, "POST").mockImplementation((() => Promise.resolve({ data: { results: [{ backend: "echo", jobID: "j" }] }, response: new Response() })) as never);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

function push(revision: number, overrides: object = {}) {
  return { type: "backends" as const, revision, checked_at: null, checking: false, problems: {}, ...overrides };
}

async function open(): Promise<LiveStore> {
  const store = show(new LiveStore(), node("a", { models: [model("chat", 0, { backend_type: "echo", in_flight: 2 })] }), node("b"));
  store.push(push(1));
  await waitFor(() => expect(store.read().backends?.revision).toBe(1));
  stage(store, createMemoryRouter([{ path: "*", element: <BackendsPage /> }], { initialEntries: ["/app/backends?view=installed"] }));
  return store;
}

it("the lists are read again when their revision moves, and only then", async () => {
  const store = await open();
  expect((await screen.findByText("echo")).textContent).toBe("echo");
  const requestCount = () => (vi.mocked(client.GET).mock.calls as unknown[][]).filter((words) => words[0] === "/backends").length;
  const previous = requestCount();
  store.push(push(1, { checking: true }));
  expect(await screen.findByText("Checking the galleries…")).toBeTruthy();
  expect(requestCount()).toBe(previous);
  answers["/api/backends/upgrades"] = { echo: { backend_name: "echo", installed_version: "1", available_version: "2" } };
  store.push(push(2, { checked_at: "2026-08-22T10:00:00Z", problems: { local: "it is gone" } }));
  expect(await screen.findByText("update to v2")).toBeTruthy();
  expect(screen.getByText("Gallery local: it is gone")).toBeTruthy();
  expect(screen.getByText("1 update available")).toBeTruthy();
});

it("a question names the nodes and what stops there; nothing is sent before (E52)", async () => {
  await open();
  fireEvent.click(await screen.findByRole("button", { name: "Delete echo…" }));
  const dialog = screen.getByRole("dialog", { name: "Delete echo on 2 nodes" });
  const lines = within(dialog).getByRole("list", { name: "Nodes" });
  expect(lines.textContent).toContain("1 replica with 2 requests in flight stops: chat #0");
  expect(lines.textContent).toContain("no replica stops");
  expect(client.POST).not.toHaveBeenCalled();
  fireEvent.click(within(dialog).getByRole("button", { name: "Delete 2 nodes" }));
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(vi.mocked(client.POST).mock.calls).toEqual([["/api/backends/changes", { body: { verb: "delete", backends: [{ backend: "echo", nodes: ["a", "b"] }] } }]]);
});

it("an upgrade goes in waves, and a last replica is confirmed by its name before it is sent again", async () => {
  answers["/api/backends/upgrades"] = { echo: { backend_name: "echo", installed_version: "1", available_version: "2" } };
  await open();
  const refused = { backend: "echo", error: "the last one", field: "last_replicas", last_replicas: ["chat"] };
  vi.mocked(client.POST).mockImplementationOnce((() => Promise.resolve({ data: { results: [refused] }, response: new Response() })) as never);
  fireEvent.click(await screen.findByRole("button", { name: "Upgrade echo…" }));
  const dialog = screen.getByRole("dialog", { name: "Upgrade echo on 2 nodes" });
  expect(within(dialog).getByRole<HTMLInputElement>("radio", { name: /^In waves/ }).checked).toBe(true);
  const send = within(dialog).getByRole("button", { name: "Upgrade 2 nodes" });
  fireEvent.click(send);
  const box = await within(dialog).findByRole("checkbox", { name: "chat" });
  fireEvent.click(send);
  expect(client.POST).toHaveBeenCalledTimes(1);
  fireEvent.click(box);
  fireEvent.click(send);
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  const backends = [{ backend: "echo", nodes: ["a", "b"], last_replicas: ["chat"] }];
  expect(vi.mocked(client.POST).mock.lastCall).toEqual(["/api/backends/changes", { body: { verb: "upgrade", backends, waves: { canary: true, max_unavailable: 1, pause_seconds: 0, stop_at_failures: 1 } } }]);
});

it("each line has version, nodes, size and what goes on, and opens its page", async () => {
  const store = await open();
  store.push({ type: "operations.snapshot", seq: 1, operations: [install("a", { name: "echo", status: "failed", error: "no image" })] });
  expect((await screen.findByRole("link", { name: "Could not install backend on a" })).getAttribute("href")).toBe("/app/backends/echo");
  const [, row] = within(screen.getByRole("table", { name: "Installed backends" })).getAllByRole("row");
  expect([...(row?.querySelectorAll("td") ?? [])].slice(0, 3).map((cell) => cell.textContent)).toEqual(["v1", "2 nodes", "1 KiB"]);
  expect(screen.getByRole("link", { name: "echo" }).getAttribute("href")).toBe("/app/backends/echo");
});
