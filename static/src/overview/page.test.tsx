import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { node, show } from "../live/fixtures";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import type { Figures, Overview } from "./data";
import { OverviewPage } from "./page";

vi.mock("../ui/chart", () => ({
  ChartPlaceholder: ({ title }: { title: string }) => <p>Place of {title}</p>,
  Chart: ({ title, lines, top, onZoom }: { title: string; lines: { values: number[] }[]; top?: number; onZoom: (from: number, to: number) => void }) => (
    <button onClick={() => onZoom(...selected)}>
      {title} {String(lines[0]?.values)} {top}
    </button>
  ),
}));

const GIB = 2 ** 30;
const NOW = "2026-08-22T10:00:00Z";
const CELL = { id: "1", name: "gpu-a", status: "healthy", gpus: 4, busy: 50, vram_used: 3 * GIB, vram_total: 8 * GIB, ram_used: 0, ram_total: 0 } as const;
const OVERVIEW: Overview = {
  at: NOW,
  nodes: [CELL, { ...CELL, id: "2", name: "gone", status: "offline" }],
  node_count: 2,
  traffic: { requests_per_second: 3.5, errors_per_second: 0, tokens_per_second: 800, first_token_seconds: null },
  attention: [{ cause: "full_disks", level: "error", text: "The models disk is full", count: 7, names: ["a", "b"] }],
  running: [{ id: "op", kind: "model_load", element: "minilm", node_name: "gpu-a", status: "processing", progress: 40, message: "sending minilm.gguf, file 1 of 2", current_bytes: 0, total_bytes: 0, last_progress_at: NOW, time_limit_at: null, created_at: NOW }],
  running_count: 1,
  first_steps: [],
};
const FIGURES: Figures = {
  scope: "cluster",
  name: "",
  from: NOW,
  step: 10,
  figures: [
    { name: "requests", gpu: null, unit: "requests", values: [20, null] },
    { name: "vram_used", gpu: null, unit: "bytes", values: [1, 2] },
    { name: "vram_total", gpu: null, unit: "bytes", values: [8, 9] },
    { name: "power", gpu: null, unit: "watts", values: [null, null] },
  ],
  events: [],
};
const AT = Date.parse(NOW) / 1000;
const DAY = 86400;
let asked: { from?: string; to?: string }[] = [];
let selected: [number, number];

beforeEach(() => {
  asked = [];
  selected = [AT - 4000, AT - 3000];
});
function iso(seconds: number): string {
  return new Date(1000 * seconds).toISOString();
}

/** Seconds before the overview's time at which the last request begins. */
function lastBeginsBefore(): number {
  return AT - Date.parse(asked.at(-1)?.from ?? "") / 1000;
}

afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
});

function open(overview: Partial<Overview> = {}, path = "/", live = new LiveStore()): void {
  vi.spyOn(client, "GET").mockImplementation(((path: string, options: { params?: { query?: unknown } }) => {
    if (path === "/api/figures") asked.push(options.params?.query as (typeof asked)[number]);
    return Promise.resolve({ data: path === "/api/figures" ? FIGURES : { ...OVERVIEW, ...overview }, response: new Response() });
  }) as never);
  stage(live, createMemoryRouter([{ path: "*", element: <OverviewPage /> }], { initialEntries: [path] }));
}

/** The feed of a server whose clock shows `NOW`, once the store has it: messages show with the next frame. */
async function greeted(live = new LiveStore()): Promise<LiveStore> {
  live.push({ type: "hello", at: NOW, build: "1", version: "1", user: { name: "a", role: "admin" } });
  await vi.waitFor(() => expect(live.read().skew).not.toBe(0));
  return live;
}

it("names workers that await approval as what needs attention, and leads to them", async () => {
  const live = show(new LiveStore(), node("b-new", { status: "pending" }), node("a-new", { status: "pending" }), node("left", { status: "pending", rejected: { at: NOW, by: "ada", reason: "" } }), node("gpu-a"));
  open({ attention: [] }, "/", live);
  const line = within(await screen.findByRole("list", { name: "Needs attention" })).getByRole("listitem");
  expect(line.textContent).toBe("2Workers await approvala-new, b-new");
  expect(within(line).getByRole("link").getAttribute("href")).toBe("/app/nodes?state=pending");
  expect(screen.queryByText("Nothing needs attention.")).toBeNull();
});

it("shows what needs attention, with the page on which to act", async () => {
  open();
  const list = await screen.findByRole("list", { name: "Needs attention" });
  expect(list.textContent).toBe("7The models disk is fulla, b and more");
  expect(within(list).getByRole("link").getAttribute("href")).toBe("/app/capacity?of=disk");
  expect(screen.getByText(/2 nodes, 4 GPUs 50% busy, 3 GiB of 8 GiB VRAM used\./)).toBeTruthy();
  expect(screen.getByRole("list", { name: "Running operations" }).textContent).toMatch(/running.*Model load minilm.*gpu-a, 40%, sending minilm.gguf, file 1 of 2.*No update for/);
  expect(screen.queryByText("First steps")).toBeNull();
});

it("averages the use of the GPUs that report it", async () => {
  open({ nodes: [CELL, { ...CELL, id: "2", busy: null }] });
  expect(await screen.findByText(/8 GPUs 50% busy/)).toBeTruthy();
  cleanup();
  open({ nodes: [{ ...CELL, busy: null }] });
  expect((await screen.findByText(/2 nodes, 4 GPUs,/)).textContent).not.toContain("busy");
});

it("shows causes with the same text apart", async () => {
  const errors = vi.spyOn(console, "error").mockImplementation(() => undefined);
  const [group] = OVERVIEW.attention;
  open({ attention: group === undefined ? [] : [group, { ...group, count: 2 }] });
  expect(await screen.findAllByText(/^The models disk is full/)).toHaveLength(2);
  expect(errors).not.toHaveBeenCalled();
});

it("shows the first steps until all are done", async () => {
  open({ nodes: [], node_count: 0, first_steps: [{ id: "add_node", done: false }, { id: "load_model", done: true }], attention: [], running_count: 0 });
  const steps = within(await screen.findByRole("region", { name: "First steps" })).getAllByRole("listitem");
  expect(steps.map((step) => step.textContent)).toEqual(["Add a node", "Add a modeldone"]);
  expect(screen.getByText("Nothing needs attention.")).toBeTruthy();
});

it("draws counts by the second, memory up to its total, and nothing that is not known", async () => {
  open();
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  await charts.findByText(/^Requests 2,/);
  expect(charts.getByText("VRAM used 1,2 9")).toBeTruthy();
  expect(charts.queryByText(/GPU power/)).toBeNull();
});

it("keeps the places of the charts while their figures load", async () => {
  let answer: (response: unknown) => void = () => undefined;
  const figures = new Promise((resolve) => (answer = resolve));
  vi.spyOn(client, "GET").mockImplementation(((path: string) => (path === "/api/figures" ? figures : Promise.resolve({ data: OVERVIEW, response: new Response() }))) as never);
  stage(new LiveStore(), createMemoryRouter([{ path: "*", element: <OverviewPage /> }]));
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  expect(charts.getByRole("status").textContent).toContain("Loading the figures over time");
  expect(charts.getAllByText(/^Place of /)).toHaveLength(8);
  answer({ data: FIGURES, response: new Response() });
  await charts.findByText(/^Requests 2,/);
  expect(charts.queryByText(/^Place of /)).toBeNull();
});

it("goes to another time, zooms and comes back", async () => {
  open();
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  fireEvent.click(await charts.findByText(/^Requests/));
  await vi.waitFor(() => expect(asked.at(-1)).toMatchObject({ scope: "cluster", from: iso(AT - 4000), to: iso(AT - 3000) }));
  fireEvent.click(charts.getByRole("button", { name: "Reset zoom" }));
  fireEvent.click(charts.getByRole("button", { name: "Week" }));
  expect(charts.getByRole("button", { name: "Week" }).getAttribute("aria-pressed")).toBe("true");
  await vi.waitFor(() => expect(asked.length).toBeGreaterThan(2));
});

it("reads the last hour by the server's clock, and longer times by the feed's", async () => {
  open({}, "/", await greeted());
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  await charts.findByText(/^Requests/);
  expect(asked).toEqual([{ scope: "cluster" }]);
  fireEvent.click(charts.getByRole("button", { name: "Day" }));
  await vi.waitFor(() => expect(asked).toHaveLength(2));
  expect(asked.at(-1)?.to).toBeUndefined();
  expect(Math.abs(lastBeginsBefore() - DAY)).toBeLessThan(10);
});

it("reads a day of an address with the server's clock, once the feed has told it", async () => {
  const live = new LiveStore();
  open({}, "/?range=day", live);
  await within(await screen.findByRole("region", { name: "Over time" })).findByText(/^Requests/);
  expect(asked).toHaveLength(1);
  await greeted(live);
  await vi.waitFor(() => expect(asked).toHaveLength(2));
  expect(Math.abs(lastBeginsBefore() - DAY)).toBeLessThan(10);
});

it("takes no inherited name for a range", async () => {
  open({}, "/?range=toString");
  await within(await screen.findByRole("region", { name: "Over time" })).findByText(/^Requests/);
  expect(screen.getByRole("button", { name: "Hour" }).getAttribute("aria-pressed")).toBe("true");
});

it("keeps the length of a zoom that reaches past now, and follows", async () => {
  open({}, "/", await greeted());
  selected = [AT - 3600, AT + 3600];
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  fireEvent.click(await charts.findByText(/^Requests/));
  await vi.waitFor(() => expect(asked).toHaveLength(2));
  expect(asked.at(-1)?.to).toBeUndefined();
  expect(Math.abs(lastBeginsBefore() - 7200)).toBeLessThan(10);
  selected = [AT - 1800, AT + 1800];
  fireEvent.click(charts.getByText(/^Requests/));
  await vi.waitFor(() => expect(charts.queryByRole("button", { name: "Reset zoom" })).toBeNull());
  expect(charts.getByRole("button", { name: "Hour" }).getAttribute("aria-pressed")).toBe("true");
});

it("zooms out to a year at most", async () => {
  open({}, "/", await greeted());
  selected = [AT - 500 * DAY, AT - DAY];
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  fireEvent.click(await charts.findByText(/^Requests/));
  await vi.waitFor(() => expect(asked).toHaveLength(2));
  expect(asked.at(-1)?.to).toBe(iso(AT - DAY));
  expect(Math.abs(lastBeginsBefore() - 365 * DAY)).toBeLessThan(10);
  selected = [AT - 364 * DAY, AT + 364 * DAY];
  fireEvent.click(charts.getByText(/^Requests/));
  await vi.waitFor(() => expect(asked).toHaveLength(3));
  expect(asked.at(-1)?.to).toBeUndefined();
  expect(Math.abs(lastBeginsBefore() - 365 * DAY)).toBeLessThan(10);
});
