import { cleanup, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import * as api from "../api/client";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { HealthPage } from "./page";

vi.mock("../api/client", { spy: true });

afterEach(() => {
  cleanup();
  vi.resetAllMocks();
});

const NOW = "2026-08-22T10:00:00Z";
const WELL = {
  at: NOW,
  state: "warning",
  parts: [
    { id: "database", name: "Database", state: "ok", text: "PostgreSQL 16.2", hint: "", since: NOW },
    { id: "schedules", name: "Schedules", state: "warning", text: "paused: nodes: liveness", hint: "Resume them in the admin.", since: null },
  ],
  schedules: [
    { id: 3, name: "nodes: liveness", cron: "* * * * * */5", paused: true, next_run: NOW, last_run: NOW, last_ok: true },
    { id: 4, name: "operations: record", cron: "23 4 * * * 0", paused: false, next_run: NOW, last_run: NOW, last_ok: false },
  ],
  processes: [{ kind: "web", name: "one:12", version: "", started_at: NOW, seen_at: NOW }],
  workers: {},
} as const;

function open(...answers: unknown[]): LiveStore {
  const requests = vi.mocked(api.call);
  for (const answer of answers) requests.mockResolvedValueOnce(answer);
  const store = new LiveStore();
  stage(store, createMemoryRouter([{ path: "*", element: <HealthPage /> }]));
  return store;
}

function line(list: string, name: string): string {
  const heading = within(screen.getByRole("list", { name: list })).getByRole("heading", { name });
  return heading.closest("li")?.textContent ?? "";
}

it("says of each part how it is, and what to do", async () => {
  open(WELL);
  await screen.findByText("Some systems need attention");
  expect(line("Parts", "Database")).toMatch(/OK.*PostgreSQL 16\.2.*since/);
  expect(line("Parts", "Schedules")).toContain("Resume them in the admin.");
});

it("leads to each schedule, and tells a paused one from one that failed", async () => {
  open(WELL);
  const link = await screen.findByRole("link", { name: /^Edit\s*nodes: liveness$/ });
  expect(link.getAttribute("href")).toBe("/admin/django_q/schedule/3/change/");
  expect(line("Schedules", "nodes: liveness")).toContain("paused");
  expect(line("Schedules", "operations: record")).toContain("failed");
  expect(line("Server processes", "one:12")).toContain("version unknown");
});

it("asks again with the feed's sign of life", async () => {
  const store = open(WELL, { ...WELL, state: "ok" });
  await screen.findByText("Some systems need attention");
  store.push({ type: "alive", at: NOW });
  await screen.findByText("All systems operational");
});

it("lets a read end that takes longer than the time between two signs of life", async () => {
  const store = open(WELL);
  await screen.findByText("Some systems need attention");
  let answer: (health: unknown) => void = () => undefined;
  vi.mocked(api.call).mockReturnValueOnce(new Promise((resolve) => (answer = resolve)));
  for (const expected of [1, 2]) {
    store.push({ type: "alive", at: NOW });
    await vi.waitFor(() => expect(store.read().beats).toBe(expected));
  }
  answer({ ...WELL, state: "error" });
  await vi.waitFor(() => expect(screen.queryByText("Some systems need attention")).toBeNull());
  expect(api.call).toHaveBeenCalledTimes(2);
});
