import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { model, node, show } from "../../live/fixtures";
import type { LiveModel } from "../../live/messages";
import { stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { posted, watchPosts } from "../../live/recorded-posts";
import { Replicas } from "./replicas";

watchPosts(404, "node_error");

afterEach(cleanup);

async function open(...models: LiveModel[]) {
  const shownNode = node("n1", { models });
  stage(show(new LiveStore(), shownNode), createMemoryRouter([{ path: "/", element: <Replicas node={shownNode} /> }]));
  await screen.findByRole("table");
}

function button(index: number) {
  return screen.getByRole("button", { name: `Unload tiny, replica ${index}, from n1` });
}

it("the question names model, node and requests, and one replica is unloaded after a yes", async () => {
  await open(model("tiny", 0), model("tiny", 1, { in_flight: 2 }));
  fireEvent.click(button(1));
  const question = within(screen.getByRole("alertdialog"));
  expect(question.getByRole("heading").textContent).toContain("Unload tiny, replica 1, from n1");
  expect(question.getByText(/2 requests in flight may finish before it stops/)).toBeTruthy();
  expect(document.activeElement).toBe(question.getByRole("button", { name: "Cancel" }));
  expect(posted.written).toEqual([]);
  fireEvent.click(question.getByRole("button", { name: "Unload" }));
  const body = { model_name: "tiny", replica_index: 1, wait: false };
  await vi.waitFor(() => expect(posted.written).toEqual([["/api/nodes/{node_id}/models/unload", body]]));
  await vi.waitFor(() => expect(screen.queryByRole("alertdialog")).toBeNull());
});

it("a refusal is said in the question, which stays", async () => {
  posted.refused = "model tiny is not loaded as replica 0 on node n1";
  await open(model("tiny", 0));
  fireEvent.click(button(0));
  const question = within(screen.getByRole("alertdialog"));
  fireEvent.click(question.getByRole("button", { name: "Unload" }));
  expect((await question.findByRole("alert")).textContent).toContain(posted.refused);
});

const LATER = new Date(Date.now() + 600_000).toISOString();

it.each([
  [{ in_flight: 3, cleanup_next_retry_at: LATER }, /Waiting for 3 requests, .* at most/],
  [{ in_flight: 0, cleanup_next_retry_at: LATER }, /Stopping/],
  [{ in_flight: 1, cleanup_next_retry_at: "2026-01-01T00:00:00Z" }, /Stopping$/],
  [{ in_flight: 0, reason: "evicted" as const }, /Stopping, evicted by a load/],
  [{ in_flight: 2, cleanup_next_retry_at: LATER, reason: "upgrade" as const }, /at most, for an upgrade/],
])("a replica that leaves says what it waits for: %o", async (overrides, text) => {
  await open(model("tiny", 0, { state: "unloading", ...overrides }));
  expect(screen.getByText(text)).toBeTruthy();
  expect(button(0).getAttribute("aria-disabled")).toBe("true");
});

it.each([
  [{ state: "loading", phase: "starting", deadline: LATER }, /Abandoned in .* at the latest/],
  [{ state: "staging", phase: "staging", deadline: LATER }, /Abandoned in .* at the latest/],
  [{ state: "unloading", phase: "stopping", deadline: LATER, reason: "load_failed" }, /Stopping, the load failed, overdue in /],
] as const)("every phase but serving shows its deadline: %o", async (more, said) => {
  await open(model("tiny", 0, more));
  expect(document.querySelector(".nd-leaving")?.textContent).toMatch(said);
});

it("one that its worker did not confirm says why, and may be asked for again", async () => {
  await open(model("tiny", 0, { state: "unloading", cleanup_error: "cannot be killed", cleanup_next_retry_at: LATER }));
  expect(screen.getByText(/May still run: cannot be killed/)).toBeTruthy();
  expect(button(0).getAttribute("aria-disabled")).not.toBe("true");
});

it("a stop that is due is not put into the past", async () => {
  await open(model("tiny", 0, { state: "unloading", cleanup_error: "cannot be killed", cleanup_next_retry_at: "2026-01-01T00:00:00Z" }));
  expect(document.querySelector(".nd-leaving")?.textContent).toBe("May still run: cannot be killed. Stopped again now.");
});

it("what is not loaded yet is not unloaded", async () => {
  await open(model("tiny", 0, { state: "loading" }));
  expect(button(0).getAttribute("aria-disabled")).toBe("true");
});
