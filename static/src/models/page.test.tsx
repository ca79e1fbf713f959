import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { model, node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { ModelsPage } from "./page";

let requests: [string, unknown][];
let broken: { file: string; error: string }[];

beforeEach(() => {
  requests = [];
  broken = [];
  const defined = [{ id: "idle", backend: "echo", capabilities: [], disabled: false, pinned: false }];
  const rule = { id: "1", model_name: "tiny", min_replicas: 1, max_replicas: 0, unsatisfiable_ticks: 0, created_at: "", updated_at: "" };
  vi.spyOn(client, "GET").mockImplementation(((path: string) => Promise.resolve({ data: path === "/api/models/capabilities" ? { data: defined, definitionErrors: broken } : [rule], response: new Response() })) as never);
  vi.spyOn(client, "POST").mockImplementation(((path: string, sent: { body: unknown }) => {
    requests.push([path, sent.body]);
    return Promise.resolve({ data: {}, response: new Response(null, { status: 202 }) });
  }) as never);
});

afterEach(cleanup);

function operation(overrides: Partial<Operation>): Operation {
  return {
    jobID: "j", id: "idle", kind: "model_load", fullName: "idle", name: "idle", status: "processing", seq: 1, progress: 40, taskType: "staging", isDeletion: false,
    isBackend: false, message: "", phase: "loading", attempts: 0, nextLookAt: "", createdAt: "2026-08-22T10:00:00Z", actor: "x", requestID: "", ...overrides,
  } as Operation;
}

function open(...operations: Operation[]): void {
  const store = show(new LiveStore(), node("n1", { models: [model("tiny", 0, { in_flight: 2 })] }), node("n2", { models: [model("tiny", 0, { id: "other" })] }));
  store.push({ type: "operations.snapshot", seq: 1, operations });
  stage(store, createMemoryRouter([{ path: "*", element: <ModelsPage /> }]));
}

async function panel(name: string) {
  return within(await screen.findByRole("region", { name }));
}

it("shows every model with its replicas by node and the way to its rule (E65, UI-8.2, UI-8.5)", async () => {
  open();
  const tiny = await panel("tiny");
  expect(tiny.getAllByRole("row").map((row) => row.textContent)).toEqual([expect.stringContaining("Node"), expect.stringMatching(/n1.*loaded.*2/), expect.stringContaining("n2")]);
  expect(tiny.getByText("not defined on this server")).toBeTruthy();
  const rule = await tiny.findByRole("link", { name: "Rule: at least 1, of tiny" });
  expect(rule.getAttribute("href")).toBe("/app/scheduling?q=tiny");
  expect((await panel("idle")).getByText("not running")).toBeTruthy();
});

it("names files that cannot be used, with their reason (review R6)", async () => {
  broken = Array.from({ length: 7 }, (_, index) => ({ file: `m${index}.yaml`, error: "is not valid YAML: month must be in 1..12 (line 2, column 8)" }));
  open();
  const section = within(await screen.findByRole("region", { name: "Definitions that cannot be used" }));
  expect(section.getByText("7 model definitions cannot be used.")).toBeTruthy();
  expect(section.getAllByRole("listitem").map((item) => item.textContent)).toEqual(broken.slice(0, 5).map(({ file, error }) => `${file} ${error}`));
  fireEvent.click(section.getByRole("button", { name: "Show 2 more" }));
  expect(section.getAllByRole("listitem")).toHaveLength(7);
  expect(await panel("idle")).toBeTruthy();
});

it("loads a model that does not run, without waiting for the end (UI-8.4)", async () => {
  open();
  fireEvent.click((await panel("idle")).getByRole("button", { name: "Load idle" }));
  await waitFor(() => expect(requests).toEqual([["/backend/load", { model: "idle", wait: false }]]));
});

it("shows a load with its progress, and one that failed with its reason (UI-8.3)", async () => {
  open(operation({}), operation({ jobID: "k", seq: 2, status: "failed", error: "no node has room", progress: 0 }));
  const idle = await panel("idle");
  expect(idle.getByRole("progressbar", { name: "Loading model idle" }).getAttribute("aria-valuenow")).toBe("40");
  expect(idle.getByText("no node has room")).toBeTruthy();
  expect(idle.getByRole("button", { name: "Load idle" }).getAttribute("aria-disabled")).toBe("true");
});

it("unloads from all nodes after a question that names requests and nodes (UI-8.4)", async () => {
  open();
  fireEvent.click((await panel("tiny")).getByRole("button", { name: "Unload all replicas of tiny" }));
  const question = within(screen.getByRole("alertdialog", { name: /Unload tiny from 2 nodes/ }));
  expect(question.getByText(/2 replicas stop\. 2 requests in flight/)).toBeTruthy();
  expect(document.activeElement).toBe(question.getByRole("button", { name: "Cancel" }));
  fireEvent.click(question.getByRole("button", { name: "Unload" }));
  await waitFor(() => expect(screen.queryByRole("alertdialog")).toBeNull());
  expect(requests).toEqual([["/api/nodes/models/unload", { model_name: "tiny", wait: false }]]);
});

it("names the node with each unload of the same replica number (UI-8.2)", async () => {
  open();
  const unloads = (await panel("tiny")).getAllByRole("button", { name: /^Unload tiny, replica/ });
  expect(unloads.map((element) => element.getAttribute("aria-label"))).toEqual(["Unload tiny, replica 0, from n1", "Unload tiny, replica 0, from n2"]);
});

it("gives a model a rule in place (UI-8.5)", async () => {
  open();
  fireEvent.click(await (await panel("idle")).findByRole("button", { name: "Add rule for idle" }));
  const form = within(await screen.findByRole("dialog", { name: "Add rule" }));
  expect(form.getByLabelText<HTMLInputElement>("Model").value).toBe("idle");
});
