import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import type { Figures, Overview } from "./data";
import { OverviewPage } from "./page";

vi.mock("../ui/chart", () => ({
  Chart: ({ title, lines, top, onZoom }: { title: string; lines: { values: number[] }[]; top?: number; onZoom: (from: number, to: number) => void }) => (
    <button onClick={() => onZoom(1000, 2000)}>
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
  running: [{ id: "op", kind: "model_load", element: "minilm", node_name: "gpu-a", status: "processing", progress: 40, created_at: NOW }],
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
let asked: unknown[] = [];

beforeEach(() => {
  asked = [];
});
afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
});

function open(overview: Partial<Overview> = {}): void {
  vi.spyOn(client, "GET").mockImplementation(((path: string, options: { params?: { query?: unknown } }) => {
    if (path === "/api/figures") asked.push(options.params?.query);
    return Promise.resolve({ data: path === "/api/figures" ? FIGURES : { ...OVERVIEW, ...overview }, response: new Response() });
  }) as never);
  stage(new LiveStore(), createMemoryRouter([{ path: "*", element: <OverviewPage /> }]));
}

it("shows what needs attention, with the page on which to act", async () => {
  open();
  const list = await screen.findByRole("list", { name: "Needs attention" });
  expect(list.textContent).toBe("7The models disk is fulla, b and more");
  expect(within(list).getByRole("link").getAttribute("href")).toBe("/app/capacity?of=disk");
  expect(screen.getByText(/2 nodes, 4 GPUs 50% busy, 3 GiB of 8 GiB VRAM used\./)).toBeTruthy();
  expect(screen.getByRole("list", { name: "Running operations" }).textContent).toMatch(/running.*model load minilm.*gpu-a, 40%/);
  expect(screen.queryByText("First steps")).toBeNull();
});

it("shows the first steps until all are done", async () => {
  open({ nodes: [], node_count: 0, first_steps: [{ id: "add_node", done: false }, { id: "load_model", done: true }], attention: [], running_count: 0 });
  const steps = within(await screen.findByRole("region", { name: "First steps" })).getAllByRole("listitem");
  expect(steps.map((step) => step.textContent)).toEqual(["Add a node", "Load a modeldone"]);
  expect(screen.getByText("Nothing.")).toBeTruthy();
});

it("draws counts by the second, memory up to its total, and nothing that is not known", async () => {
  open();
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  await charts.findByText(/^Requests 2,/);
  expect(charts.getByText("VRAM used 1,2 9")).toBeTruthy();
  expect(charts.queryByText(/GPU power/)).toBeNull();
});

it("goes to another time, zooms and comes back", async () => {
  open();
  const charts = within(await screen.findByRole("region", { name: "Over time" }));
  fireEvent.click(await charts.findByText(/^Requests/));
  await vi.waitFor(() => expect(asked.at(-1)).toMatchObject({ scope: "cluster", from: "1970-01-01T00:16:40.000Z", to: "1970-01-01T00:33:20.000Z" }));
  fireEvent.click(charts.getByRole("button", { name: "Reset zoom" }));
  fireEvent.click(charts.getByRole("button", { name: "Week" }));
  expect(charts.getByRole("button", { name: "Week" }).getAttribute("aria-pressed")).toBe("true");
  await vi.waitFor(() => expect(asked.length).toBeGreaterThan(2));
});
