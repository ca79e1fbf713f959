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

vi.mock("../../ui/chart", () => ({ Chart: ({ title }: { title: string }) => <p>{title}</p>, ChartPlaceholder: () => null }));

const ANSWERS: Readonly<Record<string, unknown>> = {
  "/api/nodes/{node_id}": { name: "n1", overrides: {}, label_sources: {}, inventory: { at: null, error: "" } },
  "/api/nodes/{node_id}/backends": [
    { name: "llama-cpp", is_meta: true, is_system: false, size: 1.5 * GIB, installed_at: new Date(Date.now() - 3 * 3600_000).toISOString() },
    { name: "piper", is_meta: false, is_system: true },
  ],
  "/api/nodes/{node_id}/events": { events: [] },
  "/api/figures": { scope: "node", name: "n1", from: "2026-08-22T10:00:00Z", step: 10, figures: [{ name: "ram_used", gpu: null, unit: "bytes", values: [1] }], events: [] },
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

/** The page at a part of it, drawn to the end. */
async function open(overrides: Partial<LiveNode> = {}, part = "") {
  const store = show(new LiveStore(), node("n1", overrides));
  window.history.replaceState(null, "", `/app/nodes/n1/${part}`);
  const router = createBrowserRouter([{ path: "/app/nodes/:id/:part?", element: <NodePage /> }, { path: "/app/*", element: <p>Elsewhere</p> }]);
  stage(store, router);
  expect(await screen.findByRole("heading", { level: 1, name: "n1" })).toBeTruthy();
  await screen.findAllByRole("region");
  return router;
}

/** Opens a question from the menu of the head. */
function choose(label: string): void {
  fireEvent.keyDown(screen.getByRole("button", { name: "More actions for n1" }), { key: "Enter" });
  fireEvent.click(screen.getByRole("menuitem", { name: label }));
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
    await open({ ...vram, total_ram: 64 * GIB, available_ram: 60 * GIB, total_disk: 100 * GIB, available_disk: 2 * GIB, in_flight_count: 7 });
    expect(panel("Memory").getByRole("img", { name: /^VRAM used: 6 GiB of 24 GiB/ })).toBeTruthy();
    const disk = panel("Memory").getByRole("img", { name: "Models disk: 98 GiB of 100 GiB, 98%" });
    expect(disk.className).toContain("full");
    fireEvent.click(screen.getByRole("link", { name: /^Replicas/ }));
    expect(panel("Replicas").getByText("7 in flight")).toBeTruthy();
  });

  it("says so if nothing was", async () => {
    await open({});
    expect(panel("Memory").getByText(/Not reported yet/)).toBeTruthy();
  });
});

describe("parts", () => {
  const current = () => document.querySelector('.tabs [aria-current="page"]')?.textContent;

  it("have addresses; an unknown one is the overview, whose charts come first", async () => {
    const router = await open({ models: [model("tiny", 0)] }, "settings");
    expect(current()).toBe("Settings");
    expect(screen.queryByRole("region", { name: "Memory" })).toBeNull();
    fireEvent.click(screen.getByRole("link", { name: "Overview" }));
    expect(router.state.location.pathname).toBe("/app/nodes/n1");
    expect(await panel("Over time").findByText("RAM used")).toBeTruthy();
    expect(screen.getAllByRole("region").map((region) => region.querySelector("h2")?.textContent)).toEqual(["Memory", "Over time", "Conditions", "Hardware"]);
    cleanup();
    await open({}, "nonsense");
    expect(current()).toBe("Overview");
  });

  it("are those that the node can have", async () => {
    const titles = () => [...document.querySelectorAll(".tabs a")].map((link) => link.textContent);
    await open({ models: [model("tiny", 0)], backends: ["echo", "piper"] });
    expect(titles()).toEqual(["Overview", "Replicas1", "Backends2", "Logs", "Timeline", "Settings"]);
    cleanup();
    await open({ node_type: "agent" }, "replicas");
    expect(titles()).toEqual(["Overview", "Timeline", "Settings"]);
  });
});

it("tells processor, cores and threads, system and driver (UW14)", async () => {
  vi.mocked(client.GET).mockImplementation((path: string) => ok(path === "/api/nodes/{node_id}" ? { ...(ANSWERS[path] as object), system: { cpu: "EPYC", cpu_cores: 24, cpu_count: 48, os: "Debian 12", kernel: "6.1" } } : ANSWERS[path]));
  await open({ gpus: [{ index: 0, uuid: "", name: "L4", total_vram: GIB, free_vram: GIB, reserved_vram: 0, utilization: null, driver: "550.54, CUDA 12.4" }] });
  expect(await panel("Hardware").findByText("EPYC, 24 cores, 48 threads")).toBeTruthy();
  expect(panel("Hardware").getByText("Debian 12, 6.1")).toBeTruthy();
  expect(panel("Hardware").getByText("550.54, CUDA 12.4")).toBeTruthy();
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
    await open(runs, "settings");
    save("1");
    const question = within(screen.getByRole("alertdialog"));
    expect(question.getByText(/has 2 replicas on this node, more than 1. Running replicas stay/)).toBeTruthy();
    expect(written).toEqual([]);
    fireEvent.click(question.getByRole("button", { name: "Save" }));
    await vi.waitFor(() => expect(written).toEqual([[CAP, { value: 1 }]]));
  });

  it("is saved without a question otherwise", async () => {
    await open(runs, "settings");
    save("3");
    await vi.waitFor(() => expect(written).toEqual([[CAP, { value: 3 }]]));
    expect(screen.queryByRole("alertdialog")).toBeNull();
  });

  it.each(["0", "1.5", "many"])("cannot be %s", async (value) => {
    await open(runs, "settings");
    save(value);
    expect(panel("Capacity").getByRole("alert").textContent).toContain("Enter a whole number from 1");
    expect(written).toEqual([]);
  });
});

it("running models have their state and requests, and a replica number where there are several (UI-4.7)", async () => {
  await open({ models: [model("tiny", 1, { state: "loading" }), model("big", 0, { in_flight: 3 }), model("tiny", 0)] }, "replicas");
  const rows = panel("Replicas").getAllByRole("row").slice(1);
  const cells = rows.map((row) => [...row.querySelectorAll("th, td")].slice(0, 3).map((cell) => cell.textContent.trim()));
  expect(cells).toEqual([
    ["big", "loaded", "3"],
    ["tiny rep 0", "loaded", "0"],
    ["tiny rep 1", "loading", "0"],
  ]);
});

it("installed backends have name, type and age of the installation (UI-4.10)", async () => {
  await open({ inventory_at: new Date().toISOString() }, "backends");
  await panel("Installed backends").findByRole("rowheader", { name: "piper" });
  const rows = panel("Installed backends").getAllByRole("row").slice(1);
  const cells = rows.map((row) => [row.querySelector("th"), ...row.querySelectorAll("td")].map((cell) => cell?.textContent.trim()));
  expect(cells).toEqual([
    ["llama-cpp", "–", "gallery meta", "1.5 GiB", "3h ago", "Upgrade…Delete…"],
    ["piper", "–", "system", "–", "unknown", ""],
  ]);
});

it("a part that cannot be loaded says so at its place, and the rest is there (UI-4.14)", async () => {
  vi.mocked(client.GET).mockImplementation((path: string) => (path === "/api/figures" ? failed() : ok(ANSWERS[path])));
  await open({ total_ram: GIB });
  expect(await panel("Over time").findByRole("button", { name: "Try again" })).toBeTruthy();
  expect(panel("Over time").getByRole("alert").textContent).toContain("it broke");
  expect(panel("Memory").getByRole("img", { name: /^RAM used/ })).toBeTruthy();
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
    choose("Remove…");
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
