import { cleanup, fireEvent, screen } from "@testing-library/react";
import { useState, type ReactNode } from "react";
import { createMemoryRouter } from "react-router";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import { node, show } from "../../live/fixtures";
import { choose, stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import { AddNode } from "./add-node";
import type { MadeJoinToken } from "./joining";

const TOKEN = `join-${"0".repeat(64)}`;
const CREATED = {
  id: "t1", state: "usable", note: "rack 4", created_at: "2026-08-22T10:00:00Z", created_by: "root", max_uses: 1, uses: 0,
  token: TOKEN, command: `T=${TOKEN}; curl`, url: "http://192.0.2.10:8080", url_is_set: true, warnings: [] as string[],
};

let store: LiveStore;
let otherTokens: unknown[];

function answer(data: unknown) {
  return Promise.resolve({ data, response: new Response() }) as never;
}

beforeEach(() => {
  otherTokens = [];
  vi.spyOn(client, "GET").mockImplementation(() => answer(otherTokens));
  vi.spyOn(client, "DELETE").mockImplementation(() => answer({ message: "join token revoked" }));
});

afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
});

function Panel(): ReactNode {
  const [token, setToken] = useState<MadeJoinToken | null>(null);
  return <AddNode id="add" token={token} onToken={setToken} />;
}

function open(created: Partial<typeof CREATED> & { expires_at?: string } = {}) {
  const expires_at = new Date(Date.now() + 3_600_000).toISOString();
  const post = vi.spyOn(client, "POST").mockImplementation(() => answer({ ...CREATED, expires_at, ...created }));
  store = show(new LiveStore());
  stage(store, createMemoryRouter([{ path: "*", element: <Panel /> }]));
  return post;
}

it("makes a token as wished and shows the whole line with what remains of it (UI-3.8)", async () => {
  const post = open();
  await choose(screen.getByLabelText("Valid for"), "10 minutes");
  fireEvent.change(screen.getByLabelText("Machines"), { target: { value: "3" } });
  fireEvent.change(screen.getByLabelText("Note (optional)"), { target: { value: " rack 4 " } });
  fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
  expect(await screen.findByText(CREATED.command)).toBeTruthy();
  expect(post.mock.calls[0]?.[1]).toEqual({ body: { lifetime_seconds: 600, uses: 3, note: "rack 4", url: window.location.origin } });
  expect(screen.getByTestId("token-remaining").textContent).toMatch(/valid for another (60 min|1h 0m), not used yet/);
  expect(screen.getByText(/Waiting for the machine/)).toBeTruthy();
});

it("a wrong number of machines is refused where it stands", () => {
  const post = open();
  fireEvent.change(screen.getByLabelText("Machines"), { target: { value: "0" } });
  fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
  expect(screen.getByRole("alert").textContent).toBe("Enter 1 to 1000.");
  expect(post).not.toHaveBeenCalled();
});

it("says before the line why it cannot work (review R16)", async () => {
  open({ url: "http://localhost:8080", url_is_set: false, warnings: ["Other machines cannot reach it: HOST=0.0.0.0 make run", "no package"] });
  fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
  const line = await screen.findByText(CREATED.command);
  for (const warning of ["Other machines cannot reach it: HOST=0.0.0.0 make run", "no package"]) {
    const shown = screen.getByText(warning);
    expect(shown.compareDocumentPosition(line) & Node.DOCUMENT_POSITION_FOLLOWING).toBeTruthy();
  }
});

it("shows the machine that joins with it, to compare and decide, then that it is connected (UI-3.8)", async () => {
  open();
  fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
  await screen.findByText(CREATED.command);
  const joined = { token: "t1", note: "rack 4", by: "root" };
  const newcomer = node("gpu-a", { status: "pending", joined, fingerprint: "abcd".repeat(16), source_address: "192.0.2.7", address: "192.0.2.7:50051" });
  show(store, node("other"), newcomer);
  const card = await screen.findByTestId("joined-gpu-a");
  expect(card.textContent).toContain("abcd abcd");
  expect(card.textContent).toContain("192.0.2.7:50051");
  expect(card.textContent).toContain("token rack 4, made by root");
  expect(screen.queryByText(CREATED.command)).toBeNull();
  expect(screen.getByTestId("announcer").textContent).toContain("gpu-a has joined");
  fireEvent.click(screen.getByRole("button", { name: "Approve gpu-a, which has joined" }));
  expect(await screen.findByRole("dialog", { name: "Approve gpu-a" })).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Cancel" }));
  show(store, { ...newcomer, status: "healthy", inventory_at: "2026-08-22T10:00:05Z" });
  expect(await screen.findByText("connected")).toBeTruthy();
  expect(screen.queryByRole("button", { name: /^Approve/ })).toBeNull();
});

it("an ended token shows no line any more", async () => {
  open({ expires_at: new Date(Date.now() - 1000).toISOString() });
  fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
  expect((await screen.findByTestId("token-remaining")).textContent).toContain("expired");
  expect(screen.queryByText(CREATED.command)).toBeNull();
});

it("revokes it, and those that were made before", async () => {
  otherTokens = [{ ...CREATED, id: "t0", note: "old one", expires_at: new Date(Date.now() + 60_000).toISOString() }];
  open();
  fireEvent.click(await screen.findByText("Active tokens: 1"));
  fireEvent.click(screen.getByRole("button", { name: "Revoke the token old one" }));
  const expectedRequest = ["/api/join-tokens/{token_id}", { params: { path: { token_id: "t0" } } }];
  await vi.waitFor(() => expect(client.DELETE).toHaveBeenCalledWith(...expectedRequest));
  fireEvent.click(screen.getByRole("button", { name: "Generate join command" }));
  await screen.findByText(CREATED.command);
  fireEvent.click(screen.getByRole("button", { name: "Revoke the token rack 4" }));
  await vi.waitFor(() => expect(screen.getByTestId("token-remaining").textContent).toContain("revoked"));
  expect(screen.queryByText(CREATED.command)).toBeNull();
});
