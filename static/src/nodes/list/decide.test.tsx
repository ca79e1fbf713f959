import { cleanup, fireEvent, screen } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import type { ReactNode } from "react";
import { afterEach, expect, it, vi } from "vitest";
import { client } from "../../api/client";
import { node, show } from "../../live/fixtures";
import { useLive } from "../../live/hooks";
import type { LiveNode } from "../../live/messages";
import { stage } from "../../live/stage";
import { LiveStore } from "../../live/store";
import type { Conflict } from "../shared/conflicts";
import { Conflicts } from "./conflicts";

afterEach(cleanup);

function claim(name: string): Conflict {
  const [first_at, last_at] = ["2026-08-22T10:00:00Z", "2026-08-22T10:00:00Z"];
  return { id: `claim-${name}`, node_id: name, node_name: name, kind: "secret", state: "open", count: 1, first_at, last_at } as Conflict;
}

let store: LiveStore;

function Page(): ReactNode {
  return <Conflicts nodes={useLive((state) => state.nodes)} />;
}

function claimed(...names: string[]): LiveNode[] {
  return names.map((name) => node(name, { open_conflicts: 1 }));
}

let answers: Promise<unknown>;

async function open(...names: string[]) {
  answers = Promise.resolve({ data: names.map(claim), response: new Response() });
  vi.spyOn(client, "GET").mockImplementation(() => answers as never);
  store = show(new LiveStore(), ...claimed(...names));
  stage(store, createMemoryRouter([{ path: "*", element: <Page /> }]));
  fireEvent.click(await screen.findByRole("button", { name: /^Review/ }));
  await screen.findByRole("heading", { name: names[0] as string });
}

it("a question stays while newer claims push its card out of sight", async () => {
  await open("b", "a");
  fireEvent.click(screen.getByRole("button", { name: "Accept the claim to a" }));
  answers = Promise.resolve({ data: ["d", "c", "b", "a"].map(claim), response: new Response() });
  show(store, ...claimed("d", "c", "b", "a"));
  await screen.findByText("d", {}, { timeout: 4000 });
  expect(screen.queryByRole("alertdialog", { name: /Accept the claim to a/ })).not.toBeNull();
});

it("a claim that is decided is not offered while the list is fetched again", async () => {
  await open("b", "a");
  answers = new Promise(() => undefined);
  show(store, ...claimed("a"));
  await screen.findByText("1 identity conflict to resolve");
  expect(screen.queryByRole("button", { name: "Accept the claim to b" })).toBeNull();
  expect(screen.queryByRole("button", { name: "Accept the claim to a" })).not.toBeNull();
});
