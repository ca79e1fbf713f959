import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { cleanup, render, screen, within } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import type { ReactNode } from "react";
import { createMemoryRouter, RouterProvider } from "react-router";
import { afterEach, describe, expect, it, vi } from "vitest";
import { Gate } from "./gate";
import type { Person } from "./session";

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

const ADA = { id: "1", name: "ada", role: "admin", mustChangePassword: false } as Person;

/** Renders the gate for somebody; undefined: the server cannot be asked. */
function enter(person: Person | null | undefined, path = "/app/activity"): { pathname: () => string; search: () => string } {
  const queries = new QueryClient({ defaultOptions: { queries: { retry: false } } });
  if (person !== undefined) queries.setQueryData(["session"], person);
  const inside: ReactNode = <Gate>{(user) => <p>secrets for {user.name}</p>}</Gate>;
  const routes = [
    { path: "/login", element: <p>sign in</p> },
    { path: "/app", element: inside, children: [{ path: "*", element: <p>a page</p> }] },
  ];
  const router = createMemoryRouter(routes, { initialEntries: [path] });
  render(
    <QueryClientProvider client={queries}>
      <Tooltip.Provider>
        <RouterProvider router={router} />
      </Tooltip.Provider>
    </QueryClientProvider>,
  );
  return { pathname: () => router.state.location.pathname, search: () => router.state.location.search };
}

describe("the gate (§2.0 access)", () => {
  it("lets an admin pass", () => {
    enter(ADA);
    expect(screen.getByText("secrets for ada")).toBeTruthy();
  });

  it("shows nothing of a page while it is looked up who asks (UI-0.1)", () => {
    vi.stubGlobal("fetch", () => new Promise(() => undefined));
    enter(undefined);
    expect(screen.getByRole("status").textContent).toBe("Checking your session");
    expect(document.body.textContent).toBe("Checking your session");
  });

  it("shows nothing but a retry if it cannot be known who asks (UI-0.1)", async () => {
    enter(undefined);
    expect(screen.queryByText(/secrets|a page/)).toBeNull();
    expect(await screen.findByRole("button", { name: "Try again" })).toBeTruthy();
    expect(screen.queryByText(/secrets|a page/)).toBeNull();
  });

  it("takes no one for an admin, but to the sign-in page, which leads back (UI-0.2, UI-0.4)", () => {
    const place = enter(null, "/app/activity?x=1");
    expect([place.pathname(), place.search()]).toEqual(["/login", "?next=%2Fapp%2Factivity%3Fx%3D1"]);
  });

  it("leads one who is no admin to the chat, from every other page (UI-0.3)", () => {
    const place = enter({ ...ADA, role: "user" });
    expect(place.pathname()).toBe("/app/chat");
    expect(within(screen.getByRole("navigation", { name: "Main" })).getAllByRole("link").map((link) => link.textContent)).toEqual(["Chat", "API keys"]);
    expect(screen.queryByText(/secrets/)).toBeNull();
  });

  it("shows one with a generated password nothing but its change", () => {
    const place = enter({ ...ADA, mustChangePassword: true });
    expect(place.pathname()).toBe("/app/password");
    expect(screen.queryByText(/secrets/)).toBeNull();
  });
});
