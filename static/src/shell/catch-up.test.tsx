import { QueryClient, QueryClientProvider, useQuery } from "@tanstack/react-query";
import { cleanup, render, screen } from "@testing-library/react";
import type { ReactNode } from "react";
import { afterEach, expect, it, vi } from "vitest";
import { ApiError } from "../api/client";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { useCatchUp } from "./feed";

afterEach(cleanup);

const OUTAGE = { id: "database-unreachable", level: "error", text: "", hint: "" } as const;

it("what failed while the database was away is asked for again when it is back, and what is not there is not", async () => {
  const fetches = { away: vi.fn(() => Promise.reject(new ApiError("no", 503))), gone: vi.fn(() => Promise.reject(new ApiError("no", 404))) };
  function Page(): ReactNode {
    useCatchUp();
    const away = useQuery({ queryKey: ["away"], queryFn: fetches.away, retry: false });
    const missing = useQuery({ queryKey: ["gone"], queryFn: fetches.gone, retry: false });
    return away.isError && missing.isError ? "failed" : "";
  }
  const store = new LiveStore();
  store.push({ type: "notices", notices: [OUTAGE] });
  render(
    <QueryClientProvider client={new QueryClient()}>
      <LiveContext.Provider value={store}>
        <Page />
      </LiveContext.Provider>
    </QueryClientProvider>,
  );
  await screen.findByText("failed");
  store.push({ type: "notices", notices: [] });
  await vi.waitFor(() => expect(fetches.away).toHaveBeenCalledTimes(2));
  expect(fetches.gone).toHaveBeenCalledOnce();
});
