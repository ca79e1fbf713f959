import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter, useLocation } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { model, node, show } from "../live/fixtures";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { answerBy, definition, Refusal } from "./model-fixtures";
import { ModelsPage } from "./page";
import type { DefinitionRow, UnusableFile } from "./shapes";

let sent: ReturnType<typeof answerBy>;
let defined: DefinitionRow[];
let unusable: UnusableFile[];
let askedFits: string[][];
let rules: unknown;

beforeEach(() => {
  defined = [definition("idle"), definition("filed", { origin: "file", state: "active" }), definition("off", { state: "disabled" })];
  unusable = [];
  rules = [{ id: "1", model_name: "tiny", min_replicas: 2, max_replicas: 0, unsatisfiable_ticks: 0, created_at: "", updated_at: "" }];
  askedFits = [];
  sent = answerBy((path, { params, body }) => {
    if (path === "/api/definitions") {
      const page = Number(params?.query?.["page"]);
      return { definitions: defined.slice(2 * (page - 1), 2 * page), total: defined.length, page, items: 2, unusable };
    }
    if (path === "/api/figures/models") return { models: [{ name: "tiny", requests_per_second: 1.25 }] };
    if (path === "/api/placement/fit") {
      const { models } = body as { models: string[] };
      askedFits.push(models);
      return { models: models.map((name) => ({ model: name, defined: true, fitting: name.startsWith("idle") ? 1 : 0, possible: name.startsWith("off") ? 0 : 2, says: "fits on n1" })) };
    }
    if (path === "/api/placement/plan") return { replicas_now: 0, wanted: 1, loads: [], retires: [], unsatisfiable: null, misses: [] };
    return path === "/api/nodes/scheduling" ? rules : {};
  });
  vi.stubGlobal("matchMedia", () => ({ matches: false, addEventListener: () => undefined, removeEventListener: () => undefined }));
  vi.stubGlobal("ResizeObserver", class { observe(): void {} unobserve(): void {} disconnect(): void {} });
  window.scrollTo = () => undefined;
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

function operation(overrides: Partial<Operation>): Operation {
  return {
    jobID: "j", id: "idle", kind: "model_load", fullName: "idle", name: "idle", status: "processing", seq: 1, progress: 40, taskType: "staging", isDeletion: false,
    isBackend: false, message: "", phase: "loading", attempts: 0, nextLookAt: "", createdAt: "2026-08-22T10:00:00Z", actor: "x", requestID: "", ...overrides,
  } as Operation;
}

function Place() {
  const { pathname, search } = useLocation();
  return <output>{pathname + search}</output>;
}

function open(address = "/app/models", ...operations: Operation[]): LiveStore {
  const store = show(new LiveStore(), node("n1", { models: [model("tiny", 0, { in_flight: 2 })] }), node("n2", { models: [model("tiny", 0, { id: "other" })] }));
  store.push({ type: "operations.snapshot", seq: 1, operations });
  stage(store, createMemoryRouter([{ path: "/app/models", element: <ModelsPage /> }, { path: "*", element: <Place /> }], { initialEntries: [address] }));
  return store;
}

async function row(name: string) {
  const header = await screen.findByRole("rowheader", { name: new RegExp(`^${name}`) });
  const element = header.closest("tr");
  if (element === null) throw new Error("not in a row");
  return element;
}

async function act(name: string, action: string): Promise<void> {
  fireEvent.keyDown(within(await row(name)).getByRole("button", { name: `Actions for ${name}` }), { key: "Enter" });
  fireEvent.click(await screen.findByRole("menuitem", { name: action }));
}

it("lists every model with state, replicas of those wanted and requests (E65, UI-8.1)", async () => {
  open();
  const tiny = await row("tiny");
  await waitFor(() => expect(tiny.textContent).toMatch(/loaded.*2 \/ 2.*1\.25\/s/));
  expect(tiny.textContent).toContain("not defined on this server");
  expect((await row("idle")).textContent).toMatch(/not running.*0.*llama-cpp.*1 GiB.*8k/);
  expect((await row("off")).textContent).toContain("disabled");
  expect(screen.getByRole("link", { name: "Add a model" }).getAttribute("href")).toBe("/app/models/add");
});

it("asks once where the models in sight fit (UW9)", async () => {
  // Names of its own: the request of the page before may come late.
  const names = ["filed-once", "idle-once", "off-once"];
  defined = names.map((name) => definition(name));
  open();
  await waitFor(async () => expect((await row("idle-once")).textContent).toContain("1 node"));
  expect((await row("filed-once")).textContent).toContain("tight");
  expect((await row("off-once")).textContent).toContain("no node now");
  const asked = askedFits.map((models) => models.filter((name) => names.includes(name)).toSorted());
  expect(asked.filter((models) => models.length > 0)).toEqual([names]);
});

it("opens the page of a model from its row", async () => {
  open();
  fireEvent.click(await row("idle"));
  expect(await screen.findByText("/app/models/idle")).toBeTruthy();
});

it("names definitions that cannot be used, with line and reason (review R6)", async () => {
  unusable = Array.from({ length: 7 }, (_, index) => ({ file: `m${index}.yaml`, name: "", line: 2, column: 8, error: "month must be in 1..12" }));
  open();
  const section = within(await screen.findByRole("region", { name: "Definitions that cannot be used" }));
  expect(section.getByText("7 model definitions cannot be used.")).toBeTruthy();
  expect(section.getAllByRole("listitem").map((item) => item.textContent)).toEqual(unusable.slice(0, 5).map(({ file, error }) => `${file} line 2: ${error}`));
  fireEvent.click(section.getByRole("button", { name: "Show 2 more" }));
  expect(section.getAllByRole("listitem")).toHaveLength(7);
});

it("loads a model that does not run, without waiting for the end (UI-8.4)", async () => {
  open();
  await act("idle", "Load…");
  fireEvent.click(within(await screen.findByRole("dialog", { name: "Load idle" })).getByRole("button", { name: "Load" }));
  await waitFor(() => expect(sent).toEqual([["POST", "/backend/load", { model: "idle", wait: false }]]));
});

it("loads more replicas on a chosen node, and refuses one that is not there", async () => {
  open();
  await act("idle", "Load…");
  const dialog = within(await screen.findByRole("dialog"));
  fireEvent.change(dialog.getByLabelText("Node"), { target: { value: "n3" } });
  fireEvent.change(dialog.getByLabelText("Replicas"), { target: { value: "3" } });
  fireEvent.click(dialog.getByRole("button", { name: "Load" }));
  expect(dialog.getByText("No node with this name is in service.")).toBeTruthy();
  expect(sent).toEqual([]);
  fireEvent.change(dialog.getByLabelText("Node"), { target: { value: "n2" } });
  fireEvent.click(dialog.getByRole("button", { name: "Load" }));
  await waitFor(() => expect(sent).toEqual([["POST", "/backend/load", { model: "idle", replicas: 3, node_id: "n2", wait: false }]]));
});

it("unloads from all nodes after a question that names requests and nodes (UI-8.4)", async () => {
  open();
  await act("tiny", "Unload all…");
  const question = within(await screen.findByRole("alertdialog", { name: /Unload tiny from 2 nodes/ }));
  expect(question.getByText(/2 replicas stop\. 2 requests in flight/)).toBeTruthy();
  expect(document.activeElement).toBe(question.getByRole("button", { name: "Cancel" }));
  fireEvent.click(question.getByRole("button", { name: "Unload" }));
  await waitFor(() => expect(screen.queryByRole("alertdialog")).toBeNull());
  expect(sent).toEqual([["POST", "/api/nodes/models/unload", { model_name: "tiny", wait: false }]]);
});

it("gives a model a rule in place (UI-8.5)", async () => {
  open();
  await act("idle", "Add rule…");
  const form = within(await screen.findByRole("dialog", { name: "Add rule" }));
  expect(form.getByLabelText<HTMLInputElement>("Model").value).toBe("idle");
});

it("saves no new rule before it knows the rules: it would replace one without a word", async () => {
  const known = rules;
  rules = new Refusal(503, "down");
  const store = open();
  await act("tiny", "Add rule…");
  const form = within(await screen.findByRole("dialog", { name: "Add rule" }));
  const save = form.getByRole("button", { name: "Save rule" });
  expect(save.getAttribute("aria-disabled")).toBe("true");
  rules = known;
  store.push({ type: "rules", revision: "2" });
  expect(await form.findByText("This model has a rule. Saving replaces it.")).toBeTruthy();
  expect(save.getAttribute("aria-disabled")).toBeNull();
});

it("deletes a definition with its files after a question, but not one that a file defines (UI-8.6)", async () => {
  open();
  await act("idle", "Delete…");
  const question = within(await screen.findByRole("alertdialog", { name: /Delete idle/ }));
  expect(question.getByText("The model has no replicas.")).toBeTruthy();
  fireEvent.click(question.getByRole("checkbox"));
  fireEvent.click(question.getByRole("button", { name: "Delete" }));
  await waitFor(() => expect(sent).toEqual([["DELETE", "/api/definitions/{name}", undefined]]));
  fireEvent.keyDown(within(await row("filed")).getByRole("button", { name: "Actions for filed" }), { key: "Enter" });
  expect((await screen.findByRole("menuitem", { name: "Delete…" })).getAttribute("title")).toBe("defined by a file in the models folder; remove the file");
});

it("keeps filter and order in the address (UI-8.1)", async () => {
  open("/app/models?q=IDL&sort=-size", operation({ jobID: "k", seq: 2, status: "failed", error: "no node has the memory", progress: 0 }));
  expect((await row("idle")).textContent).toContain("failed");
  expect(screen.getAllByRole("rowheader")).toHaveLength(1);
  fireEvent.click(screen.getByRole("button", { name: "Running" }));
  expect(await screen.findByText("No matching models")).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Show all" }));
  await waitFor(() => expect(screen.getAllByRole("rowheader")).toHaveLength(4));
});

it("says how to begin where nothing is defined", async () => {
  defined = [];
  stage(show(new LiveStore(), node("n1")), createMemoryRouter([{ path: "*", element: <ModelsPage /> }]));
  expect(await screen.findByText("No models")).toBeTruthy();
  expect(screen.getAllByRole("link", { name: "Add a model" })).toHaveLength(2);
});
