import { cleanup, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import type { Operation } from "../live/messages";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { ActivityPage } from "./activity";
import { at, install } from "./fixtures";

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

it("shows one card for each operation, and cancels all of them in one request", async () => {
  const first = install("a", { cancellable: true });
  const nodes = ["b", "c"].map((id) => ({ node_id: id, node_name: id, status: "downloading" as const, percentage: 10 }));
  await open("", first, install("b", { cancellable: true, nodes }));
  const section = await screen.findByRole("region", { name: "In progress" });
  expect(within(section).getAllByRole("article")).toHaveLength(2);
  const post = vi.spyOn(client, "POST").mockResolvedValue({ data: { done: 1, ended: 1, refused: 0, reasons: [] }, response: new Response() });
  fireEvent.click(within(section).getByRole("button", { name: "Cancel all (2)…" }));
  fireEvent.click(within(await screen.findByRole("alertdialog")).getByRole("button", { name: "Cancel 2 operations" }));
  await waitFor(() => expect(document.body.textContent).toContain("1 cancelled, 1 had already finished"));
  expect(post.mock.lastCall).toEqual(["/api/operations/bulk", { body: { verb: "cancel", ids: ["job-a", "job-b"] } }]);
});

it("a cancelled operation says how many of its nodes had finished", async () => {
  const nodes = (["success", "cancelled", "cancelled"] as const).map((status, n) => ({ node_id: `n${n}`, node_name: `n${n}`, status, percentage: 0 }));
  await open("", install("a", { status: "cancelled", message: "2 cancelled, 1 had already finished (by anna)", finishedAt: at(1), nodes }));
  expect((await screen.findByRole("region", { name: "Recently finished" })).textContent).toContain("2 cancelled, 1 had already finished");
});
