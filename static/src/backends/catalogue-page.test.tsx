import { cleanup, fireEvent, screen, waitFor } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { choose, stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { install } from "../operations/fixtures";
import { BackendsPage } from "./page";

const ENTRY = { gallery: "localai", tags: [], capabilities: null, metaBackendFor: "", isAlias: false, isDevelopment: false, version: "", description: "", variants: [] };
const CATALOGUE = {
  backends: [
    { ...ENTRY, id: "localai@echo", name: "echo", description: "**Echo** of [words](https://e.org)" },
    {
      ...ENTRY,
      id: "localai@whisper",
      name: "whisper",
      tags: ["audio"],
      variants: [{ capability: "nvidia", build: "cuda12-whisper", reason: "the entry lists this build for nvidia" }],
    },
  ],
  allTags: ["audio"],
  nodesByCapability: { nvidia: 1, default: 2 },
  galleryErrors: [{ name: "away", error: "HTTP status 503", readAt: "2026-11-24T01:00:00Z" }],
  repositories: [{}],
  preferDevelopmentBackends: false,
};
const answers: Record<string, unknown> = { "/api/backends": CATALOGUE, "/backends": [], "/api/backends/upgrades": {} };

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", class { observe() {} unobserve() {} disconnect() {} });
  vi.spyOn(client, "GET").mockImplementation(((path: string) => Promise.resolve({ data: answers[path], response: new Response() })) as never);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

async function open(...operations: Operation[]) {
  const store = show(new LiveStore(), node("a"));
  store.push({ type: "operations.snapshot", seq: 1, operations });
  await waitFor(() => expect(store.read().operations.size).toBe(operations.length));
  const router = createMemoryRouter([{ path: "*", element: <BackendsPage /> }], { initialEntries: ["/app/backends"] });
  stage(store, router);
  await screen.findByText("echo");
  return router;
}

it("the search counts again after another view and after Back (E50)", async () => {
  const router = await open();
  fireEvent.change(screen.getByRole("searchbox", { name: "Search backends" }), { target: { value: "whisper" } });
  await waitFor(() => expect(screen.queryByText("echo")).toBeNull());
  await waitFor(() => expect(router.state.location.search).toContain("whisper"));
  fireEvent.click(screen.getByRole("link", { name: "Installed" }));
  expect(await screen.findByText("No backends installed")).toBeTruthy();
  void router.navigate(-1);
  expect(await screen.findByText("whisper")).toBeTruthy();
  expect(screen.getByRole<HTMLInputElement>("searchbox", { name: "Search backends" }).value).toBe("whisper");
  expect(screen.queryByText("echo")).toBeNull();
});

it("a description is plain text in its line and in its tip, and there is no line without one (E55)", async () => {
  await open();
  const text = screen.getByText("Echo of words");
  expect(text.getAttribute("title")).toBe("Echo of words");
  const [, echo, whisper] = screen.getAllByRole("row");
  expect([echo?.querySelectorAll("p").length, whisper?.querySelectorAll("p").length]).toEqual([1, 0]);
});

it("what runs shows on its line, and a failure leaves the line as it was: it can be installed again (A50, O51)", async () => {
  await open(install("a", { name: "whisper" }), install("b", { name: "echo", status: "failed", error: "no image" }));
  expect(screen.getAllByText(/^installing on/).map((pill) => pill.closest("tr")?.querySelector("a")?.textContent)).toEqual(["whisper"]);
  expect(screen.getByRole("button", { name: "Install echo…" }).getAttribute("aria-disabled")).toBeNull();
});

it("a tag and the nodes that can run an entry narrow the list; the tag is in the address", async () => {
  const router = await open();
  await choose(screen.getByRole("combobox", { name: "Tag" }), "audio");
  await waitFor(() => expect(screen.queryByText("echo")).toBeNull());
  await waitFor(() => expect(router.state.location.search).toBe("?tag=audio"));
  await choose(screen.getByRole("combobox", { name: "Tag" }), "All tags");
  expect(await screen.findByText("echo")).toBeTruthy();
  fireEvent.click(screen.getByRole("checkbox", { name: "Runs on your nodes" }));
  await waitFor(() => expect(screen.queryByText("echo")).toBeNull());
});

it("each line says how many nodes can run it, and opens the page that says why", async () => {
  const router = await open();
  expect(screen.getByText("no compatible nodes").closest("tr")?.querySelector("a")?.textContent).toBe("echo");
  expect(screen.getByText("1 of 3 nodes").closest("tr")?.querySelector("a")?.textContent).toBe("whisper");
  fireEvent.click(screen.getByRole("link", { name: "whisper" }));
  expect(router.state.location.pathname).toBe("/app/backends/whisper");
});

it("a gallery that is away says why, and how old its entries are", async () => {
  await open();
  expect(screen.getByText("Gallery away: HTTP status 503")).toBeTruthy();
  expect(screen.getByText(/^The entries shown are from/)).toBeTruthy();
});
