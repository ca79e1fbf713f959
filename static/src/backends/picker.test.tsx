import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { install } from "../operations/fixtures";
import { BackendsPage } from "./page";

const CATALOGUE = {
  backends: [{ id: "g@echo", name: "echo", description: "", gallery: "g", tags: [], version: "", isAlias: false, isDevelopment: false, isMeta: false, variants: [] }],
  allTags: [],
  nodesByCapability: {},
  galleryErrors: [],
  repositories: [{}],
  preferDevelopmentBackends: false,
};

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", class { observe() {} unobserve() {} disconnect() {} });
  vi.spyOn(client, "GET").mockImplementation((() => Promise.resolve({ data: CATALOGUE, response: new Response() })) as never);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

function open(store: LiveStore) {
  stage(store, createMemoryRouter([{ path: "*", element: <BackendsPage /> }]));
}

it("nodes that are not told yet are neither called none nor without a backend", async () => {
  const store = new LiveStore();
  open(store);
  const button = await screen.findByRole("button", { name: "Install echo…" });
  expect(screen.queryByText("not installed")).toBeNull();
  fireEvent.click(button);
  expect(screen.queryByText("No nodes available")).toBeNull();
  show(store, node("a"));
  await screen.findByRole("checkbox", { name: "Select a" });
  fireEvent.click(screen.getAllByRole("button", { name: "Close" })[0] as HTMLElement);
  expect(await screen.findByText("not installed")).toBeTruthy();
});

it("a cluster without nodes is called so", async () => {
  const store = show(new LiveStore());
  open(store);
  fireEvent.click(await screen.findByRole("button", { name: "Install echo…" }));
  expect(await screen.findByText("No nodes available")).toBeTruthy();
});

it("no row moves under the pointer because somebody else installs there", async () => {
  const store = show(new LiveStore(), node("a"), node("b"), node("c"));
  open(store);
  fireEvent.click(await screen.findByRole("button", { name: "Install echo…" }));
  await screen.findByRole("checkbox", { name: "Select c" });
  const order = () =>
    within(screen.getByRole("table"))
      .getAllByRole("checkbox", { name: /Select .$/ })
      .map((box) => box.getAttribute("aria-label"));
  const previous = order();
  store.push({ type: "operations.snapshot", seq: 1, operations: [install("c")] });
  await waitFor(() => expect(screen.getByRole("table").textContent).toContain("Installing"));
  expect(order()).toEqual(previous);
});
