import { cleanup, fireEvent, screen, within } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { model, node, show } from "../../live/fixtures";
import type { LiveNode, Operation } from "../../live/messages";
import { stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { posted, watchPosts } from "../../live/recorded-posts";
import { install } from "../../operations/fixtures";
import { BackendActions } from "./backend-actions";

watchPosts(409, "conflict");

afterEach(cleanup);

async function open(overrides: Partial<LiveNode> = {}, operations: Operation[] = []) {
  const shownNode = node("n1", overrides);
  const element = <BackendActions node={shownNode} name="llama-cpp" operations={operations} />;
  stage(show(new LiveStore(), shownNode), createMemoryRouter([{ path: "/", element }]));
  await screen.findByRole("button", { name: "Delete llama-cpp" });
}

function openDialog(verb: "Upgrade" | "Delete") {
  fireEvent.click(screen.getByRole("button", { name: `${verb} llama-cpp` }));
  return within(screen.getByRole("alertdialog"));
}

const DELETE = "/api/nodes/{node_id}/backends/delete";
const UPGRADE = "/api/nodes/{node_id}/backends/upgrade";

it.each([
  ["Upgrade", UPGRADE],
  ["Delete", DELETE],
] as const)("%s names the replicas that stop, and is sent after a yes", async (verb, path) => {
  const models = [model("tiny", 0, { in_flight: 2 }), model("tiny", 1), model("voice", 0, { backend_type: "piper" })];
  await open({ models });
  const question = openDialog(verb);
  expect(question.getByRole("heading").textContent).toContain(`${verb} backend llama-cpp on n1`);
  expect(question.getByText(/2 replicas with 2 requests in flight stop immediately/)).toBeTruthy();
  expect(question.getAllByText(/replica \d/).map((item) => item.textContent)).toEqual(["tiny, replica 0", "tiny, replica 1"]);
  expect(posted.written).toEqual([]);
  fireEvent.click(question.getByRole("button", { name: verb }));
  await vi.waitFor(() => expect(posted.written).toEqual([[path, { backend: "llama-cpp" }]]));
  await vi.waitFor(() => expect(screen.queryByRole("alertdialog")).toBeNull());
  expect(screen.getByText(`${verb} of llama-cpp requested.`)).toBeTruthy();
});

it("the safe answer to Delete has the focus, and sends nothing", async () => {
  await open();
  const question = openDialog("Delete");
  const cancel = question.getByRole("button", { name: "Cancel" });
  expect(document.activeElement).toBe(cancel);
  expect(question.getByText("No replica on this node uses the backend under this name.")).toBeTruthy();
  fireEvent.click(cancel);
  expect(screen.queryByRole("alertdialog")).toBeNull();
  expect(posted.written).toEqual([]);
});

it("a refusal is said in the question, which stays", async () => {
  posted.refused = "backend_install of llama-cpp is in progress (operation 7, processing)";
  await open();
  const question = openDialog("Delete");
  fireEvent.click(question.getByRole("button", { name: "Delete" }));
  expect(await question.findByRole("alert")).toBeTruthy();
  expect(question.getByRole("alert").textContent).toContain(posted.refused);
});

it("what is under way shows in the row, and keeps from another command", async () => {
  const upgrade = { kind: "backend_upgrade", taskType: "upgrade", name: "llama-cpp" } as const;
  await open({}, [install("n1", { ...upgrade, progress: 40, phase: "downloading" })]);
  expect(screen.getByRole("progressbar", { name: "Upgrading backend llama-cpp" }).getAttribute("aria-valuenow")).toBe("40");
  fireEvent.click(screen.getByRole("button", { name: "Delete llama-cpp" }));
  expect(screen.queryByRole("alertdialog")).toBeNull();
  expect(screen.getByRole("button", { name: "Delete llama-cpp" }).getAttribute("aria-disabled")).toBe("true");
});

it("the work on another backend keeps from nothing", async () => {
  await open({}, [install("n1", { name: "echo" })]);
  expect(screen.queryByRole("progressbar")).toBeNull();
  expect(openDialog("Delete").getByRole("button", { name: "Delete" })).toBeTruthy();
});

it.each([
  ["backend_delete", "deletion", true],
  ["backend_upgrade", "upgrade", false],
] as const)("a failed %s says why in the row, and its own request is sent again", async (kind, taskType, isDeletion) => {
  const failure = { kind, taskType, isDeletion, name: "llama-cpp", fullName: "llama-cpp", status: "failed", error: "no room left" } as const;
  await open({}, [install("n1", failure)]);
  expect(screen.getByText("no room left")).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Retry llama-cpp on n1" }));
  await vi.waitFor(() => expect(posted.written).toEqual([["/api/operations/{job_id}/retry", {}]]));
});
