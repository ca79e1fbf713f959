import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { cleanup, render, screen } from "@testing-library/react";
import { createMemoryRouter, RouterProvider } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { node, show } from "../live/fixtures";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { Palette } from "./palette";

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

/** A letter as the browser tells it, without what React's own helper for tests waits for. */
function type(box: HTMLElement, text: string): void {
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value")?.set?.call(box, text);
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

it("Enter right after the last letter opens what was typed, not what was on top before", async () => {
  vi.spyOn(client, "GET").mockReturnValue(new Promise(() => undefined));
  vi.stubGlobal("ResizeObserver", class { observe() {} unobserve() {} disconnect() {} });
  Element.prototype.scrollIntoView = vi.fn();
  const store = show(new LiveStore(), node("slow"), node("fine"));
  await vi.waitFor(() => expect(store.read().nodes.size).toBe(2));
  const none = () => undefined;
  const palette = <Palette onClose={none} onShortcuts={none} onSignOut={none} />;
  const router = createMemoryRouter([{ path: "*", element: palette }]);
  render(
    <QueryClientProvider client={new QueryClient()}>
      <LiveContext.Provider value={store}>
        <RouterProvider router={router} />
      </LiveContext.Provider>
    </QueryClientProvider>,
  );
  const box = await screen.findByRole("combobox", { name: "Search" });
  vi.stubGlobal("IS_REACT_ACT_ENVIRONMENT", false);
  type(box, "slow");
  // What is urgent is drawn before the browser tells the next key; what is deferred may not be.
  for (let turn = 0; turn < 5; turn += 1) await Promise.resolve();
  box.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  await vi.waitFor(() => expect(router.state.location.pathname).not.toBe("/"));
  expect(router.state.location.pathname).toBe("/app/nodes/slow");
});
