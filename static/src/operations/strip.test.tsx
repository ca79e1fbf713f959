import { cleanup, fireEvent, screen } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { install } from "./fixtures";
import { OperationsStrip } from "./strip";

afterEach(cleanup);

let store: LiveStore;

async function open(...operations: Operation[]): Promise<void> {
  store = new LiveStore();
  store.push({ type: "operations.snapshot", seq: 1, operations });
  stage(store, createMemoryRouter([{ path: "*", element: <OperationsStrip /> }]));
  await screen.findByTestId("operations-strip");
}

function publish(...operations: Operation[]): void {
  store.push({ type: "operations.delta", seq: Math.max(...operations.map((operation) => operation.seq)), operations });
}

it("the button of the list stays where it is, with its focus, when another operation comes first", async () => {
  await open(install("a", { name: "far", progress: 50 }));
  const list = screen.getByRole("button", { name: "Show every operation" });
  list.focus();
  publish(install("b", { name: "near", progress: 10 }));
  await screen.findByRole("button", { name: "Hide near" });
  expect(document.activeElement).toBe(list);
});

it("what was hidden comes back when the same job fails, and can be dismissed then (E18, A50)", async () => {
  await open(install("a", { name: "first", progress: 10 }));
  fireEvent.click(screen.getByRole("button", { name: "Hide first" }));
  expect(screen.queryByTestId("operations-strip")).toBeNull();
  publish(install("a", { name: "first", progress: 20 }));
  await vi.waitFor(() => expect(store.read().operations.get("job-a")?.progress).toBe(20));
  expect(screen.queryByTestId("operations-strip")).toBeNull();
  publish(install("a", { name: "first", status: "failed", error: "no image", finishedAt: "2026-08-22T10:00:05Z" }));
  expect((await screen.findByTestId("operations-strip")).textContent).toContain("no image");
  expect(screen.getByRole("button", { name: "Dismiss the failure of first" })).toBeTruthy();
});

it("what waits says when it retries and when it gives up (UW23)", async () => {
  const later = (seconds: number): string => new Date(Date.now() + seconds * 1000).toISOString();
  const waits = { status: "waiting_for_nodes", message: "node gpu-3 is offline", nextLookAt: later(3630) } as const;
  await open(install("a", { ...waits, givesUpAt: later(23.5 * 3600) }));
  expect(screen.getByText("retrying in 1h, gives up in 23h")).toBeTruthy();
});

it("a load that sends files says which one of how many, and its bytes once", async () => {
  const message = "sending b.bin to n1, file 2 of 3: 1 MiB of 4 MiB, 1 MiB/s, 3 s left";
  const load = { kind: "model_load", taskType: "staging", isBackend: false, phase: "staging", message } as const;
  await open(install("n1", { ...load, progress: 40, currentBytes: 1024 ** 2, totalBytes: 4 * 1024 ** 2 }));
  fireEvent.click(screen.getByRole("button", { name: "Show every operation" }));
  expect(screen.getAllByText(message)).toHaveLength(2);
  expect(screen.queryByText(/1 MiB \/ 4 MiB/)).toBeNull();
});

it("a press that was begun on one failure dismisses no other one", async () => {
  await open(install("a", { name: "first", status: "failed", finishedAt: "2026-08-22T10:00:01Z" }));
  const button = screen.getByRole("button", { name: "Dismiss the failure of first" });
  publish(install("b", { name: "second", status: "failed", finishedAt: "2026-08-22T10:00:05Z" }));
  await vi.waitFor(() => expect(screen.getByRole("button", { name: "Dismiss the failure of second" })).not.toBe(button));
  fireEvent.click(button);
  expect(button.isConnected).toBe(false);
});
