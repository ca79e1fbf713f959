import { cleanup, render, screen, waitFor } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { createMemoryRouter, RouterProvider } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { ActivityPage } from "./activity";
import { at, install } from "./fixtures";

afterEach(cleanup);

it("the address leads to an operation that has ended, however many ended after it", async () => {
  Element.prototype.scrollIntoView = vi.fn();
  const store = new LiveStore();
  const operations = Array.from({ length: 80 }, (_, n) => install(`n${n}`, { status: "completed", finishedAt: at(100 - n) }));
  store.push({ type: "operations.snapshot", seq: 1, operations });
  await waitFor(() => expect(store.read().operations.size).toBe(80));
  const router = createMemoryRouter([{ path: "*", element: <ActivityPage /> }], { initialEntries: ["/app/activity#job-job-n70"] });
  render(
    <LiveContext.Provider value={store}>
      <Tooltip.Provider>
        <RouterProvider router={router} />
      </Tooltip.Provider>
    </LiveContext.Provider>,
  );
  await screen.findByRole("region", { name: "Recently finished" });
  await waitFor(() => expect(document.activeElement?.id).toBe("job-job-n70"));
});
