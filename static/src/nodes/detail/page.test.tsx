import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createBrowserRouter } from "react-router";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import { GIB, model, node, show } from "../../live/fixtures";
import type { LiveNode } from "../../live/messages";
import { stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { announce } from "../../ui/announce";
import { NodePage } from "./page";

// Needs a canvas.
vi.mock("./spark", () => ({ default: () => null }));

const ANSWERS: Readonly<Record<string, unknown>> = {
  "/api/nodes/{node_id}": { name: "n1", overrides: {}, label_sources: {}, inventory: { at: null, error: "" } },
  "/api/nodes/{node_id}/backends": [
    { name: "llama-cpp", is_meta: true, is_system: false, installed_at: new Date(Date.now() - 3 * 3600_000).toISOString() },
    { name: "piper", is_meta: false, is_system: true },
  ],
  "/api/nodes/{node_id}/events": { events: [] },
};

const ok = (data: unknown) => Promise.resolve({ data, response: new Response() }) as never;

const failed = () => Promise.resolve({ error: { error: "it broke" }, response: new Response(null, { status: 500 }) }) as never;

/** What was written: path and body. */
let written: [string, unknown][];

beforeEach(() => {
  written = [];
  announce("");
  vi.spyOn(client, "GET").mockImplementation((path: string) => ok(ANSWERS[path]));
  vi.spyOn(client, "PUT").mockImplementation((path: string, ...[sent]: { body?: unknown }[]) => {
    written.push([path, sent?.body]);
    return ok({});
  });
});

afterEach(cleanup);

async function open(overrides: Partial<LiveNode> = {}) {
  const store = show(new LiveStore(), node("n1", overrides));
  window.history.replaceState(null, "", "/app/nodes/n1");
  const router = createBrowserRouter([{ path: "/app/nodes/:id", element: <NodePage /> }, { path: "/app/*", element: <p>Elsewhere</p> }]);
  stage(store, router);
  expect(await screen.findByRole("heading", { level: 1, name: "n1" })).toBeTruthy();
  await screen.findByRole("region", { name: "Memory" });
  return router;
}

function panel(name: string) {
  return within(screen.getByRole("region", { name }));
}

describe("what a node has (UI-4.2)", () => {
  it("shows of memory and disk only what was reported", async () => {
    await open({ total_ram: 64 * GIB, available_ram: 60 * GIB });
    expect(panel("Memory").getByRole("img", { name: /^RAM used: 4 GiB of 64 GiB/ })).toBeTruthy();
    expect(panel("Memory").queryByText(/VRAM|disk/)).toBeNull();
  });

  it("shows all three, and the requests in flight", async () => {
    const vram = { total_vram: 24 * GIB, available_vram: 18 * GIB };
    await open({ ...vram, total_ram: 64 * GIB, available_ram: 60 * GIB, total_disk: 100 * GIB, available_disk: 90 * GIB, in_flight_count: 7 });
    expect(panel("Memory").getByRole("img", { name: /^VRAM used: 6 GiB of 24 GiB/ })).toBeTruthy();
    expect(panel("Memory").getByRole("img", { name: "Models disk: 10 GiB of 100 GiB" })).toBeTruthy();
    expect(panel("Replicas").getByText("7 in flight")).toBeTruthy();
  });

  it("says so if nothing was", async () => {
    await open({});
    expect(panel("Memory").getByText(/Not reported yet/)).toBeTruthy();
  });
});

it("the last heartbeat of a revoked secret is not called good", async () => {
  const beat = { last_heartbeat: "2026-01-01T00:00:00Z" };
  await open(beat);
  expect(panel("Conditions").getByText("Heartbeat").className).toBe("pill good");
  cleanup();
  await open({ ...beat, status: "pending", fingerprint: "", revoked: { at: "", by: "anna", reason: "" } });
  expect(panel("Conditions").getByText("Heartbeat").className).toBe("pill warn");
});

describe("the replica cap (UI-4.4)", () => {
  const CAP = "/api/nodes/{node_id}/max-replicas-per-model";
  const runs = { models: [model("tiny", 0), model("tiny", 1)], max_replicas_per_model: 2 };

  function save(value: string): void {
    fireEvent.click(panel("Capacity").getByRole("button", { name: "Edit maximum replicas per model" }));
    fireEvent.change(panel("Capacity").getByRole("textbox"), { target: { value } });
    fireEvent.click(panel("Capacity").getByRole("button", { name: "Save" }));
  }

  it("below what runs is asked about first, with what will not happen", async () => {
    await open(runs);
    save("1");
    const question = within(screen.getByRole("alertdialog"));
    expect(question.getByText(/has 2 replicas on this node, more than 1. Running replicas stay/)).toBeTruthy();
    expect(written).toEqual([]);
    fireEvent.click(question.getByRole("button", { name: "Save" }));
    await vi.waitFor(() => expect(written).toEqual([[CAP, { value: 1 }]]));
  });

  it("is saved without a question otherwise", async () => {
    await open(runs);
    save("3");
    await vi.waitFor(() => expect(written).toEqual([[CAP, { value: 3 }]]));
    expect(screen.queryByRole("alertdialog")).toBeNull();
  });

  it.each(["0", "1.5", "many"])("cannot be %s", async (value) => {
    await open(runs);
    save(value);
    expect(panel("Capacity").getByRole("alert").textContent).toContain("A whole number from 1");
    expect(written).toEqual([]);
  });
});

it("running models have their state and requests, and a replica number where there are several (UI-4.7)", async () => {
  await open({ models: [model("tiny", 1, { state: "loading" }), model("big", 0, { in_flight: 3 }), model("tiny", 0)] });
  const rows = panel("Replicas").getAllByRole("row").slice(1);
  const cells = rows.map((row) => [...row.querySelectorAll("th, td")].slice(0, 3).map((cell) => cell.textContent.trim()));
  expect(cells).toEqual([
    ["big", "loaded", "3"],
    ["tiny rep 0", "loaded", "0"],
    ["tiny rep 1", "loading", "0"],
  ]);
});

it("installed backends have name, type and age of the installation (UI-4.10)", async () => {
  await open({ inventory_at: new Date().toISOString() });
  await panel("Installed backends").findByRole("rowheader", { name: "piper" });
  const rows = panel("Installed backends").getAllByRole("row").slice(1);
  const cells = rows.map((row) => [row.querySelector("th"), ...row.querySelectorAll("td")].map((cell) => cell?.textContent.trim()));
  expect(cells).toEqual([
    ["llama-cpp", "–", "gallery meta", "3h ago", "Upgrade…Delete…"],
    ["piper", "–", "system", "unknown", ""],
  ]);
});

it("a part that cannot be loaded says so at its place, and the rest is there (UI-4.14)", async () => {
  vi.mocked(client.GET).mockImplementation((path: string) => (path.endsWith("/backends") ? failed() : ok(ANSWERS[path])));
  await open({ models: [model("big", 0)] });
  expect(await panel("Installed backends").findByRole("button", { name: "Try again" })).toBeTruthy();
  expect(panel("Installed backends").getByRole("alert").textContent).toContain("it broke");
  expect(panel("Replicas").getByRole("rowheader", { name: "big" })).toBeTruthy();
  expect(screen.getAllByRole("alert")).toHaveLength(1);
});

describe("what is offered follows the state (UI-4.15)", () => {
  const offered = () =>
    [...(document.querySelector("header")?.querySelectorAll("button") ?? [])].map((button) => button.textContent).filter((text) => text !== "");

  it.each<[LiveNode["status"], Partial<LiveNode>, string[]]>([
    ["pending", {}, ["Approve…", "Reject…"]],
    ["healthy", {}, ["Drain…", "Install backend…"]],
    ["offline", {}, ["Resume…", "Drain…", "Install backend…"]],
    [
      "draining",
      { drain: { since: "", by: "admin", reason: "", own: false, deadline: null, engines_gone_at: null, engines_error: "" } },
      ["Resume…", "Install backend…"],
    ],
  ])("of a %s node", async (status, overrides, expected) => {
    await open({ status, ...overrides });
    expect(offered()).toEqual(expected);
  });
});

describe("a node that is deregistered", () => {
  let answer: () => void = () => undefined;

  async function deregister() {
    vi.spyOn(client, "DELETE").mockImplementation(() => new Promise((resolve) => (answer = () => resolve({ response: new Response() }))) as never);
    const router = await open();
    fireEvent.click(screen.getByRole("button", { name: "Remove…" }));
    const question = within(screen.getByRole("alertdialog"));
    fireEvent.change(question.getByRole("textbox"), { target: { value: "n1" } });
    fireEvent.click(question.getByRole("button", { name: "Remove" }));
    await vi.waitFor(() => expect(client.DELETE).toHaveBeenCalled());
    return router;
  }

  it("leads to the others", async () => {
    const router = await deregister();
    answer();
    await vi.waitFor(() => expect(router.state.location.pathname).toBe("/app/nodes"));
  });

  it("fetches no one back who has gone elsewhere before the answer", async () => {
    const router = await deregister();
    await router.navigate("/app/activity");
    const led = vi.spyOn(router, "navigate");
    answer();
    await vi.waitFor(() => expect(document.body.textContent).toContain("n1 deregistered."));
    expect(led).not.toHaveBeenCalled();
  });
});
