import { cleanup, fireEvent, screen, waitFor } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it } from "vitest";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { ActivityPage } from "./activity";
import { install } from "./fixtures";

afterEach(cleanup);

async function open(search: string, ...operations: Operation[]): Promise<void> {
  const store = new LiveStore();
  store.push({ type: "operations.snapshot", seq: 1, operations });
  await waitFor(() => expect(store.read().operations.size).toBe(operations.length));
  stage(store, createMemoryRouter([{ path: "*", element: <ActivityPage /> }], { initialEntries: [`/app/activity${search}`] }));
  await screen.findByRole("heading", { name: "Activity" });
}

it("a filter that nothing matches says no more than that, and leads back to everything (E8)", async () => {
  await open("?show=models", install("a"));
  expect(await screen.findByText("No “models” operations")).toBeTruthy();
  expect(screen.queryByText("No operations running")).toBeNull();
  fireEvent.click(screen.getByRole("button", { name: "Show all" }));
  expect(await screen.findByRole("region", { name: "In progress" })).toBeTruthy();
});

it("a load that sends files says which one of how many, and its bytes once", async () => {
  const message = "sending b.bin to n1, file 2 of 3: 1 MiB of 4 MiB, 1 MiB/s, 3 s left";
  const load = { kind: "model_load", taskType: "staging", isBackend: false, phase: "staging", message } as const;
  await open("", install("n1", { ...load, progress: 40, currentBytes: 1024 ** 2, totalBytes: 4 * 1024 ** 2 }));
  expect(await screen.findByText(message)).toBeTruthy();
  expect(screen.queryByText(/1 MiB \/ 4 MiB/)).toBeNull();
});

it.each<[Operation[], string]>([
  [[install("a")], "1 in progress"],
  [[install("a", { status: "failed" })], "1 needs attention"],
  [[install("a"), install("b", { status: "failed" })], "1 in progress · 1 needs attention"],
])("the head drops what there is none of (E9) %#", async (operations, text) => {
  await open("?show=models", ...operations);
  expect(await screen.findByText(text)).toBeTruthy();
});
