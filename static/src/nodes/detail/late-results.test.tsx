// Answers that come after the person has gone on to something else.
import { act, cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createBrowserRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import { node, show } from "../../live/fixtures";
import type { LiveNode } from "../../live/messages";
import { choose, stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { announce } from "../../ui/announce";
import { NodePage } from "./page";

vi.mock("../../ui/chart", () => ({ Chart: () => null, ChartPlaceholder: () => null }));

const ok = (data: unknown = {}) => ({ data, response: new Response() }) as never;

const ANSWERS: Readonly<Record<string, unknown>> = {
  "/api/nodes/{node_id}": { name: "n1", overrides: {}, label_sources: {}, inventory: { at: null, error: "" } },
  "/api/nodes/{node_id}/backends": [],
  "/api/figures": { scope: "node", name: "n1", from: "2026-08-22T10:00:00Z", step: 10, figures: [], events: [] },
  "/api/nodes/{node_id}/events": { events: [] },
};

/** Answers what was asked for last. */
let answer: (data?: unknown) => void;

const parked = () => new Promise((resolve) => (answer = (data) => resolve(ok(data)))) as never;

beforeEach(() => {
  announce("");
  vi.spyOn(client, "GET").mockImplementation((path: string) => Promise.resolve(ok(ANSWERS[path])) as never);
  for (const method of ["POST", "PATCH", "DELETE"] as const) vi.spyOn(client, method).mockImplementation(parked);
});

afterEach(cleanup);

async function open(overrides: Partial<LiveNode> = {}, part = "settings") {
  const store = show(new LiveStore(), node("n1", overrides));
  window.history.replaceState(null, "", `/app/nodes/n1/${part}`);
  const never = new Promise<never>(() => undefined);
  const router = createBrowserRouter([
    { path: "/app/nodes/:id/:part?", element: <NodePage /> },
    { path: "/app/activity", lazy: () => never },
    { path: "/app/*", element: <p>Elsewhere</p> },
  ]);
  const queries = stage(store, router);
  await screen.findAllByRole("region");
  return { store, router, queries };
}

function panel(name: string) {
  return within(screen.getByRole("region", { name }));
}

/** Opens a question from the menu of the head. */
function ask(label: string): void {
  fireEvent.keyDown(screen.getByRole("button", { name: "More actions for n1" }), { key: "Enter" });
  fireEvent.click(screen.getByRole("menuitem", { name: label }));
}

const expectAnnounced = (text: string) => waitFor(() => expect(screen.getByTestId("announcer").textContent).toContain(text));

function type(label: string, value: string): HTMLElement {
  const field = panel("Labels").getByLabelText(label);
  field.focus();
  fireEvent.change(field, { target: { value } });
  return field;
}

it("the next label, begun before the answer for the last one, stays as it is typed, and so does the focus", async () => {
  await open();
  type("Key", "tier");
  fireEvent.submit(type("Value", "fast"));
  await vi.waitFor(() => expect(client.PATCH).toHaveBeenCalled());
  const key = type("Key", "zone");
  const value = type("Value", "w");
  answer();
  await expectAnnounced("Label tier=fast set.");
  expect([key, value].map((field) => (field as HTMLInputElement).value)).toEqual(["zone", "w"]);
  expect(document.activeElement).toBe(value);
});

it("a label that is set leaves an empty form, and the focus at its key", async () => {
  await open();
  const key = type("Key", "tier");
  fireEvent.submit(type("Value", "fast"));
  await vi.waitFor(() => expect(client.PATCH).toHaveBeenCalled());
  answer();
  await expectAnnounced("Label tier=fast set.");
  expect((key as HTMLInputElement).value).toBe("");
  expect(document.activeElement).toBe(key);
});

it("a label whose removal is answered late takes the focus from nothing", async () => {
  await open({ labels: { tier: "fast" } });
  const button = panel("Labels").getByRole("button", { name: "Remove label tier=fast" });
  button.focus();
  fireEvent.click(button);
  await vi.waitFor(() => expect(client.DELETE).toHaveBeenCalled());
  const value = type("Value", "w");
  answer();
  await expectAnnounced("Label tier removed.");
  expect(document.activeElement).toBe(value);
});

it("a label that was removed can be put back as it was (UI-4.18)", async () => {
  const { store } = await open({ labels: { zone: "west 1" } });
  fireEvent.click(panel("Labels").getByRole("button", { name: "Remove label zone=west 1" }));
  await vi.waitFor(() => expect(client.DELETE).toHaveBeenCalled());
  answer();
  await expectAnnounced("You can undo this.");
  show(store, node("n1", { labels: {} }));
  fireEvent.click(await panel("Labels").findByRole("button", { name: "Undo: restore label zone=west 1" }));
  await vi.waitFor(() => expect(vi.mocked(client.PATCH).mock.calls[0]?.[1]).toEqual(expect.objectContaining({ body: { zone: "west 1" } })));
  answer();
  await expectAnnounced("Label zone restored.");
});

it("a VRAM budget is offered only where there is VRAM, or where one is set (UI-4.18)", async () => {
  const { store } = await open();
  const edit = () => panel("Capacity").queryByRole("button", { name: "Edit VRAM budget" });
  expect(edit()).toBeNull();
  show(store, node("n1", { vram_budget: "80%" }));
  await vi.waitFor(() => expect(edit()).not.toBeNull());
});

it("a value that is handed back takes the focus from nothing that is typed in meanwhile", async () => {
  const { store } = await open({ max_replicas_per_model_manually_set: true });
  const button = panel("Capacity").getByRole("button", { name: "Reset Maximum replicas per model to worker default" });
  button.focus();
  fireEvent.click(button);
  await vi.waitFor(() => expect(client.DELETE).toHaveBeenCalled());
  answer();
  await expectAnnounced("reset to the worker default");
  const value = type("Value", "w");
  show(store, node("n1", { max_replicas_per_model_manually_set: false }));
  await panel("Capacity").findByText(/^Reset\. The worker's value/);
  expect(document.activeElement).toBe(value);
});

it("the answer to one question closes no other one", async () => {
  await open();
  ask("Rotate secret…");
  const first = within(screen.getByRole("alertdialog"));
  fireEvent.change(first.getByRole("textbox"), { target: { value: "n1" } });
  fireEvent.click(first.getByRole("button", { name: "Rotate secret" }));
  await vi.waitFor(() => expect(client.POST).toHaveBeenCalled());
  fireEvent.click(first.getByRole("button", { name: "Cancel" }));
  ask("Revoke secret…");
  answer();
  await expectAnnounced("Secret rotation requested for n1.");
  expect(screen.queryByRole("alertdialog", { name: /Revoke secret/ })).not.toBeNull();
});

it("the answer to a question closes it", async () => {
  await open();
  ask("Rotate secret…");
  const question = within(screen.getByRole("alertdialog"));
  fireEvent.change(question.getByRole("textbox"), { target: { value: "n1" } });
  fireEvent.click(question.getByRole("button", { name: "Rotate secret" }));
  await vi.waitFor(() => expect(client.POST).toHaveBeenCalled());
  answer();
  await expectAnnounced("Secret rotation requested for n1.");
  expect(screen.queryByRole("alertdialog")).toBeNull();
});

it("a deregistration calls off no way that was begun to another page", async () => {
  const { router } = await open();
  ask("Remove…");
  const question = within(screen.getByRole("alertdialog"));
  fireEvent.change(question.getByRole("textbox"), { target: { value: "n1" } });
  fireEvent.click(question.getByRole("button", { name: "Remove" }));
  await vi.waitFor(() => expect(client.DELETE).toHaveBeenCalled());
  fireEvent.click(question.getByRole("button", { name: "Cancel" }));
  await act(() => {
    void router.navigate("/app/activity");
    return Promise.resolve();
  });
  expect(router.state.navigation.location?.pathname).toBe("/app/activity");
  answer();
  await expectAnnounced("n1 deregistered.");
  expect(router.state.navigation.location?.pathname).toBe("/app/activity");
});

it("older events that come after another kind was chosen are not put under that kind", async () => {
  const event = (id: number, kind: string) => ({ id, kind, at: "2026-08-22T10:00:00Z", last_at: "", count: 1, actor: "", actor_kind: "", cause: "", status_before: "", status_after: "" });
  vi.mocked(client.GET).mockImplementation(((path: string, sent: { params: { query?: { kind?: string; cursor?: number } } }) => {
    if (!path.endsWith("/events")) return Promise.resolve(ok(ANSWERS[path]));
    const { kind, cursor } = sent.params.query ?? {};
    if (cursor !== undefined) return parked();
    return Promise.resolve(ok(kind === undefined ? { events: [event(9, "approved")], next_cursor: 9 } : { events: [event(8, "drained")] }));
  }) as never);
  const { queries } = await open({}, "timeline");
  fireEvent.click(await panel("Timeline").findByRole("button", { name: "Older" }));
  await choose(panel("Timeline").getByRole("combobox"), "Drain started");
  await waitFor(() => expect(panel("Timeline").getByRole("list").textContent).toContain("Drain started"));
  answer({ events: [event(3, "registered")] });
  await waitFor(() => expect(queries.isMutating()).toBe(0));
  expect(panel("Timeline").getByRole("list").textContent).not.toContain("Registered");
  await choose(panel("Timeline").getByRole("combobox"), "All types");
  await waitFor(() => expect(panel("Timeline").getByRole("list").textContent).toContain("Registered"));
});
