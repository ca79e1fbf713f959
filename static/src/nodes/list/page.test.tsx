import { act, cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter, useNavigate, type RouteObject } from "react-router";
import type { ReactNode } from "react";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import { GIB, model, node, show } from "../../live/fixtures";
import { stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { listen } from "../../ui/shortcuts";

// The test's document has no layout: nothing is narrow, nothing changes its size.
vi.hoisted(() => {
  const never = { matches: false, addEventListener: () => undefined, removeEventListener: () => undefined };
  window.matchMedia = () => never as unknown as MediaQueryList;
  window.scrollTo = () => undefined;
});

const { NodesPage } = await import("./page");

class NoSizes {
  observe(): void {}
  unobserve(): void {}
  disconnect(): void {}
}

let store: LiveStore;

beforeEach(() => {
  vi.stubGlobal("ResizeObserver", NoSizes);
  store = new LiveStore();
});

afterEach(() => {
  cleanup();
  vi.useRealTimers();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

function open(path = "/app/nodes", otherRoutes: RouteObject[] = []): () => string {
  const router = createMemoryRouter([{ path: "/app/nodes", element: <NodesPage /> }, ...otherRoutes], { initialEntries: [path] });
  stage(store, router);
  return () => router.state.location.search;
}

const FLEET = [
  node("waits", { status: "pending" }),
  node("ill", { status: "unhealthy", reason: "its engines do not answer", gpu_vendor: "nvidia" }),
  node("gone", { status: "offline" }),
  node("lost", { status: "offline" }),
  node("well", {
    total_vram: 24 * GIB,
    available_vram: 18 * GIB,
    total_ram: 64 * GIB,
    available_ram: 60 * GIB,
    models: [model("tiny", 0, { in_flight: 3 }), model("big", 0, { state: "loading" })],
  }),
];

function rows(): string[] {
  return within(screen.getByRole("grid", { name: "Nodes" }))
    .getAllByRole("link")
    .map((link) => link.textContent);
}

describe("a machine that joins (UI-3.8)", () => {
  const joined = { token: "t1", note: "rack 4", by: "root" };

  it("waits for its approval in one place: in the steps while they are open, then with the others", async () => {
    const created = {
      id: "t1", state: "usable", note: "rack 4", created_at: "2026-08-22T10:00:00Z", created_by: "root", max_uses: 2, uses: 0,
      expires_at: new Date(Date.now() + 3_600_000).toISOString(), token: "join-0", command: "T=join-0; curl", url: "http://h:1", url_is_set: true, warnings: [],
    };
    vi.spyOn(client, "GET").mockImplementation(() => Promise.resolve({ data: [], response: new Response() }) as never);
    vi.spyOn(client, "POST").mockImplementation(() => Promise.resolve({ data: created, response: new Response() }) as never);
    open();
    show(store, node("well"), node("waits", { status: "pending" }));
    fireEvent.click(await screen.findByRole("button", { name: "Add a node" }));
    fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
    await screen.findByText(created.command);
    show(store, node("well"), node("waits", { status: "pending" }), node("joins", { status: "pending", joined }));
    expect(await screen.findByTestId("joined-joins")).toBeTruthy();
    fireEvent.click(await screen.findByRole("button", { name: "Review 1 worker awaiting approval" }));
    expect(await screen.findByTestId("pending-waits")).toBeTruthy();
    expect(screen.queryByTestId("pending-joins")).toBeNull();
    fireEvent.click(screen.getByRole("button", { name: "Add a node" }));
    expect(await screen.findByTestId("pending-joins")).toBeTruthy();
    expect(screen.queryByTestId("joined-joins")).toBeNull();
    fireEvent.click(screen.getByRole("button", { name: "Add a node" }));
    expect(screen.queryByText(created.command)).toBeNull();
  });
});

describe("waiting for the first nodes (UI-3.1)", () => {
  it("is shown, and ends with them", async () => {
    open();
    expect(screen.getByText(/Loading nodes/)).toBeTruthy();
    show(store, node("well"));
    expect(await screen.findByRole("grid", { name: "Nodes" })).toBeTruthy();
    expect(screen.queryByText(/Loading/)).toBeNull();
  });

  it("ends when there is no feed, with what happens next", () => {
    open();
    act(() => store.lost("stale"));
    expect(screen.getByText("Reconnecting automatically.")).toBeTruthy();
    expect(screen.queryByText(/Loading/)).toBeNull();
  });
});

describe("a cluster without nodes", () => {
  it("shows how one joins, by itself, and no screen of a cluster that is off (UI-3.2, UI-3.7)", async () => {
    open();
    show(store);
    expect(await screen.findByText("No workers registered yet")).toBeTruthy();
    expect(screen.getByRole("region", { name: "Add a node" })).toBeTruthy();
    expect(screen.queryByRole("button", { name: "Add a node" })).toBeNull();
  });

  it("is not what one sees while there is no feed (UI-3.2)", () => {
    open();
    act(() => store.lost("stale"));
    expect(screen.queryByText(/No worker|Add a node/)).toBeNull();
  });
});

it("Add a node opens the panel and closes it again (UI-3.7)", async () => {
  open();
  show(store, ...FLEET);
  const button = await screen.findByRole("button", { name: "Add a node" });
  expect(screen.queryByRole("region", { name: "Add a node" })).toBeNull();
  fireEvent.click(button);
  expect(screen.getByRole("region", { name: "Add a node" })).toBeTruthy();
  fireEvent.click(button);
  expect(screen.queryByRole("region", { name: "Add a node" })).toBeNull();
});

it("calls out what is unhealthy and offline beside what is pending, as filters (UI-3.5)", async () => {
  const search = open();
  show(store, ...FLEET);
  expect(await screen.findByRole("heading", { name: "1 worker awaiting approval" })).toBeTruthy();
  const states = within(screen.getByRole("group", { name: "State" }));
  expect(states.getAllByRole("button").map((button) => button.textContent)).toEqual([
    "pending1",
    "offline2",
    "unhealthy1",
    "draining0",
    "healthy1",
  ]);
  fireEvent.click(states.getByRole("button", { name: /^offline/ }));
  await vi.waitFor(() => expect(rows()).toEqual(["gone", "lost"]));
  fireEvent.click(states.getByRole("button", { name: /^unhealthy/ }));
  await vi.waitFor(() => expect(rows()).toEqual(["gone", "lost", "ill"]));
  await vi.waitFor(() => expect(search()).toBe("?state=offline%2Cunhealthy"));
});

it("a pending node whose secret was revoked says why it cannot be approved (UI-3.4)", async () => {
  open();
  show(store, node("lost", { status: "pending", fingerprint: "", revoked: { at: "", by: "anna", reason: "" } }), node("new", { status: "pending" }));
  fireEvent.click(await screen.findByRole("button", { name: "Review 2 workers awaiting approval" }));
  const refusals = await screen.findAllByText(/^Cannot be approved yet: no worker has registered since/);
  expect(refusals.map((element) => element.closest("li")?.dataset["testid"])).toEqual(["pending-lost"]);
});

it("a node chosen right after typing opens, however long its page is fetched, and Back finds the filter (UI-3.11)", async () => {
  let fetched: (module: { Component: () => ReactNode }) => void = () => undefined;
  open("/app/nodes", [{ path: "/app/nodes/:id", lazy: () => new Promise((resolve) => (fetched = resolve)) }]);
  show(store, ...FLEET);
  const box = await screen.findByRole("searchbox");
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout"] });
  fireEvent.change(box, { target: { value: "lost" } });
  fireEvent.click(screen.getByRole("link", { name: "lost" }));
  await act(() => vi.advanceTimersByTimeAsync(2000));
  fetched({ Component: TheNode });
  await act(() => vi.advanceTimersByTimeAsync(0));
  expect(screen.getByRole("heading").textContent).toBe("The node");
  vi.useRealTimers();
  fireEvent.click(screen.getByRole("button", { name: "Back" }));
  expect(await screen.findByRole("searchbox")).toHaveProperty("value", "lost");
});

function TheNode(): ReactNode {
  const navigate = useNavigate();
  return (
    <>
      <h1>The node</h1>
      <button onClick={() => void navigate(-1)}>Back</button>
    </>
  );
}

it("a row has state and reason, memory used and total, models with their state and requests (UI-3.10, UI-3.12)", async () => {
  open("/app/nodes?state=healthy,unhealthy");
  show(store, ...FLEET);
  const row = (name: string) => screen.getByRole("link", { name }).closest<HTMLElement>("[role=row]")?.textContent ?? "";
  await screen.findByRole("grid", { name: "Nodes" });
  expect(row("ill")).toContain("unhealthyits engines do not answer");
  expect(screen.getByRole("img", { name: "VRAM: 6 GiB of 24 GiB" })).toBeTruthy();
  expect(screen.getByRole("img", { name: "RAM: 4 GiB of 64 GiB" })).toBeTruthy();
  expect(row("well")).toContain("tiny3 in flight");
  expect(row("well")).toContain("bigloading");
});

it("a popover closes by Escape and by a press outside (UI-0.15)", async () => {
  open();
  show(store, ...FLEET);
  const opener = within(await screen.findByRole("search", { name: "Nodes" })).getByRole("button", { name: /^GPU/ });
  fireEvent.click(opener);
  fireEvent.keyDown(await screen.findByRole("dialog", { name: "GPU" }), { key: "Escape" });
  await vi.waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  fireEvent.click(opener);
  await screen.findByRole("dialog", { name: "GPU" });
  // It listens to the page from its next task on.
  await vi.waitFor(() => {
    fireEvent.pointerDown(document.body);
    fireEvent.click(document.body);
    expect(screen.queryByRole("dialog")).toBeNull();
  });
});

it("the key that selects does nothing to a row that the filter hides", async () => {
  show(store, ...FLEET);
  open();
  const stop = listen();
  const rows = () => screen.getAllByRole("row").slice(1);
  await screen.findByRole("grid");
  fireEvent.focus(rows()[0] as HTMLElement);
  fireEvent.change(screen.getByRole("searchbox", { name: "Filter nodes" }), { target: { value: "well" } });
  await vi.waitFor(() => expect(screen.queryByText("1 of 5 nodes")).not.toBeNull());
  fireEvent.keyDown(document.body, { key: "x" });
  expect(screen.queryByRole("toolbar", { name: "Selected nodes" })).toBeNull();
  stop();
});

it("colours a disk that is nearly full, and says so in words too (review R14)", async () => {
  show(store, node("full", { total_disk: 100 * GIB, available_disk: 4 * GIB }));
  open();
  const bar = await screen.findByRole("img", { name: "Disk: 96 GiB of 100 GiB, 96%" });
  expect(bar.className).toContain("full");
});
