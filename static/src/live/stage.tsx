// The context of a component in unit tests: the feed's store, queries without retries, tips.
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import type { ComponentProps, ReactNode } from "react";
import { RouterProvider } from "react-router";
import { Announcer } from "../ui/announce";
import { LiveContext } from "./hooks";
import type { LiveStore } from "./store";

/** Draws the router's page; answers its queries, which a test may look into. */
export function stage(store: LiveStore, router: ComponentProps<typeof RouterProvider>["router"]): QueryClient {
  const queries = new QueryClient({ defaultOptions: { queries: { retry: false } } });
  render(<Around store={store} queries={queries} router={router} />);
  return queries;
}

function Around({ store, queries, router }: { store: LiveStore; queries: QueryClient; router: Parameters<typeof stage>[1] }): ReactNode {
  return (
    <QueryClientProvider client={queries}>
      <LiveContext.Provider value={store}>
        <Tooltip.Provider>
          <RouterProvider router={router} />
          <Announcer />
        </Tooltip.Provider>
      </LiveContext.Provider>
    </QueryClientProvider>
  );
}

/** Chooses from a list as the keyboard does. */
export async function choose(trigger: HTMLElement, words: string): Promise<void> {
  fireEvent.keyDown(trigger, { key: "Enter" });
  fireEvent.keyDown(await screen.findByRole("option", { name: words }), { key: "Enter" });
}
