import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { model, node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { install } from "../operations/fixtures";
import { BackendPage, sizes } from "./detail";

const MIB = 2 ** 20;
const ENTRY = {
  id: "localai@echo", name: "echo", gallery: "localai", description: "**Echo** of words", license: "MIT", version: "2.0.0", tags: ["test"], capabilities: null, metaBackendFor: "any-echo",
  isAlias: false, isMeta: false, isDevelopment: false, urls: ["https://echo.test/", "javascript:alert(1)"], variants: [{ capability: "nvidia", build: "echo", reason: "not for specific hardware" }],
};
const PLACES = ["a", "b"].map((id) => ({ node_id: id, node_name: id, node_status: "healthy", version: id === "a" ? "1.0.0" : "1.1.0", digest: `sha256:${id.repeat(64)}`, size: id === "a" ? MIB : 2 * MIB, alias: "parrot" }));
let answers: Record<string, unknown>;

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", class { observe() {} unobserve() {} disconnect() {} });
  answers = {
    "/api/backends": { backends: [ENTRY], galleryErrors: [], repositories: [{}], nodesByCapability: { nvidia: 1, default: 1 } },
    "/backends": [{ Name: "echo", RunFile: "", IsMeta: false, IsSystem: false, Metadata: { name: "echo", gallery_url: "file:///g", uri: "oci://images.test/echo" }, nodes: PLACES }],
    "/api/backends/upgrades": { echo: { backend_name: "echo", installed_version: "1.1.0", available_version: "2.0.0" } },
  };
  vi.spyOn(client, "GET").mockImplementation(((path: string) => Promise.resolve({ data: answers[path], response: new Response() })) as never);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

async function open(name = "echo", ...operations: Operation[]): Promise<LiveStore> {
  const store = show(new LiveStore(), node("a", { models: [model("chat", 0, { backend_type: "echo" })] }), node("b"));
  store.push({ type: "operations.snapshot", seq: 1, operations });
  await waitFor(() => expect(store.read().operations.size).toBe(operations.length));
  stage(store, createMemoryRouter([{ path: "/app/backends/:name", element: <BackendPage /> }], { initialEntries: [`/app/backends/${name}`] }));
  return store;
}

const panel = async (name: string) => within(await screen.findByRole("region", { name }));

it("says what it is, what is installed, what is offered and by what licence", async () => {
  await open("Echo");
  const facts = await panel("Backend");
  await facts.findByText("1 node differs");
  const shown = new Map(facts.getAllByRole("definition").map((value) => [value.previousElementSibling?.textContent, value.textContent]));
  expect(Object.fromEntries(shown) as unknown).toMatchObject({ Available: "v2.0.0", Size: "1 MiB to 2 MiB", Licence: "MIT", Gallery: "localai", Source: "oci://images.test/echo", Aliases: "parrot", "Selected by": "any-echo" });
  expect(screen.getByRole("heading", { level: 1 }).textContent).toBe("echo");
  expect(screen.getByText("Echo of words")).toBeTruthy();
});

it("makes a link of the web's addresses only", async () => {
  await open();
  const facts = await panel("Backend");
  expect((await facts.findByRole("link", { name: "https://echo.test/" })).getAttribute("rel")).toBe("noreferrer");
  expect(facts.getByText("javascript:alert(1)").closest("a")).toBeNull();
});

it("lists its nodes with version, digest, size and what differs, and acts on the selected ones", async () => {
  await open();
  const nodes = await panel("Nodes");
  const [, first, second] = (await nodes.findAllByRole("row")).map((row) => row.textContent);
  expect(first).toMatch(/^ahealthyv1\.0\.0 sha256:a{12} differs1 MiB/);
  expect(second).toMatch(/^bhealthyv1\.1\.0 sha256:b{12} 2 MiB/);
  expect(nodes.getByRole("link", { name: "a" }).getAttribute("href")).toBe("/app/nodes/a/backends");
  fireEvent.click(nodes.getByRole("checkbox", { name: "Select b" }));
  expect(nodes.getByText("Actions apply to 1 selected node")).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Upgrade…" }));
  expect(screen.getByRole("dialog", { name: "Upgrade echo on b" })).toBeTruthy();
});

it("acts on no other node when the selected one is gone", async () => {
  const store = await open();
  fireEvent.click((await panel("Nodes")).getByRole("checkbox", { name: "Select b" }));
  store.push({ type: "nodes.delta", cursor: "e:2", changed: [], removed: ["b"] });
  expect(await screen.findByText("Actions apply to 0 selected nodes")).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Upgrade…" }));
  expect(screen.queryByRole("dialog")).toBeNull();
});

it("shows which build each kind of node gets, and why (worker.md 18.4)", async () => {
  await open();
  const compatible = await panel("Compatible nodes");
  expect(compatible.getByText("1 of 2 nodes")).toBeTruthy();
  expect(compatible.getAllByRole("row")[1]?.textContent).toBe("nvidia1echonot for specific hardware");
});

it("shows a failure with its reason beside the backend, and what goes on (E48)", async () => {
  await open("echo", install("a", { name: "echo", status: "failed", error: "no image" }), install("b", { name: "echo" }));
  const work = await panel("Operations");
  expect(work.getByText("no image")).toBeTruthy();
  expect(work.getByRole("button", { name: "Retry echo on a" })).toBeTruthy();
  expect(work.getByRole("link", { name: /^Installing backend/ })).toBeTruthy();
});

it("says so if nobody has or offers it", async () => {
  await open("nobody");
  expect(await screen.findByText("This backend is not on any node or in any gallery.")).toBeTruthy();
});

it("a system backend is not changed", async () => {
  answers["/backends"] = [{ Name: "echo", IsSystem: true, Metadata: null, nodes: PLACES }];
  answers["/api/backends/upgrades"] = {};
  await open();
  const nodes = await panel("Nodes");
  expect(nodes.queryByRole("checkbox")).toBeNull();
  expect(screen.queryByRole("button", { name: /More actions/ })).toBeNull();
});

it("leaves out sizes that no worker reports", () => {
  expect([sizes([{ size: 0 }]), sizes([{ size: MIB }, { size: 0 }, { size: MIB }])]).toEqual(["", "1 MiB"]);
});
