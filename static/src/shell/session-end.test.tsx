import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { cleanup, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { call, client } from "../api/client";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { reloadPage, whenOver, type Person } from "./session";
import { SessionEnd } from "./session-end";

vi.mock("./session", async (original) => ({ ...(await original<typeof import("./session")>()), reloadPage: vi.fn() }));

afterEach(cleanup);

const ADA = { id: "1", name: "ada", role: "admin", mustChangePassword: false } as Person;
const NO = { error: { error: "no" }, response: new Response(null, { status: 401 }) };

let signedIn: Person | null;
let store: LiveStore;
const restart = vi.fn();

beforeEach(() => {
  restart.mockClear();
  vi.mocked(reloadPage).mockClear();
  store = new LiveStore();
  vi.spyOn(client, "GET").mockImplementation((() => Promise.resolve({ data: { user: signedIn }, response: new Response() })) as never);
  render(
    <QueryClientProvider client={new QueryClient()}>
      <LiveContext.Provider value={store}>
        <Tooltip.Provider>
          <SessionEnd user={ADA} onBack={restart} />
        </Tooltip.Provider>
      </LiveContext.Provider>
    </QueryClientProvider>,
  );
});

/** A request that is sent now; answers how to have it refused. */
function sent(): () => Promise<unknown> {
  let refuse: () => void = () => undefined;
  const failed = call(new Promise<typeof NO>((resolve) => (refuse = () => resolve(NO)))).catch((error: unknown) => error);
  return () => {
    refuse();
    return failed;
  };
}

it("late refusals of what was sent with an old session end no new one", async () => {
  signedIn = ADA;
  const [first, second] = [sent(), sent()];
  await first();
  await vi.waitFor(() => expect(restart).toHaveBeenCalledOnce());
  await second();
  await new Promise((resolve) => setTimeout(resolve));
  expect(screen.queryByRole("dialog")).toBeNull();
});

it("a session that is refused again though it was found to hold is over", async () => {
  signedIn = ADA;
  await sent()();
  await vi.waitFor(() => expect(restart).toHaveBeenCalledOnce());
  await sent()();
  expect(await screen.findByRole("dialog", { name: "Your session has ended" })).toBeTruthy();
});

it("a session that no one has is over, which is told to what goes on in the page", async () => {
  signedIn = null;
  const listener = vi.fn();
  const stop = whenOver(listener);
  await sent()();
  expect(await screen.findByRole("dialog", { name: "Your session has ended" })).toBeTruthy();
  expect(listener).toHaveBeenCalledOnce();
  stop();
});

it("begins anew for a person who comes back to a tab after another account has signed in elsewhere", async () => {
  signedIn = ADA;
  document.dispatchEvent(new Event("visibilitychange"));
  await vi.waitFor(() => expect(client.GET).toHaveBeenCalledOnce());
  signedIn = { ...ADA, id: "2", name: "bob" };
  expect(reloadPage).not.toHaveBeenCalled();
  document.dispatchEvent(new Event("visibilitychange"));
  await vi.waitFor(() => expect(reloadPage).toHaveBeenCalledOnce());
});

it("begins anew if the feed is refused because another account has signed in elsewhere", async () => {
  signedIn = { ...ADA, id: "2", name: "vera" };
  store.lost("forbidden");
  await vi.waitFor(() => expect(reloadPage).toHaveBeenCalledOnce());
});
