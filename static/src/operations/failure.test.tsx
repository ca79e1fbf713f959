import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, expect, it, vi } from "vitest";
import type { Operation } from "../live/messages";
import * as calls from "./calls";
import { FailureActions } from "./failure";
import { install } from "./fixtures";

vi.mock("./calls", { spy: true });

afterEach(cleanup);

const queries = new QueryClient();

function shown(...operations: Operation[]) {
  return (
    <QueryClientProvider client={queries}>
      <Tooltip.Provider>
        <FailureActions operations={operations} />
      </Tooltip.Provider>
    </QueryClientProvider>
  );
}

it("can be acted on again when the retry has failed as well, in the same place", async () => {
  const act = vi.mocked(calls.act).mockResolvedValue();
  const [first, second] = [1, 2].map((n) => install("a", { jobID: `job-${n}`, status: "failed" })) as [Operation, Operation];
  const { rerender } = render(shown(first));
  const button = screen.getByRole("button", { name: "Retry echo on a" });
  fireEvent.click(button);
  await vi.waitFor(() => expect(button.getAttribute("aria-disabled")).toBe("true"));
  rerender(shown(second));
  await vi.waitFor(() => expect(button.getAttribute("aria-disabled")).toBeNull());
  fireEvent.click(button);
  await vi.waitFor(() => expect(act.mock.calls.map(([verb, items]) => [verb, ...items.map((operation) => operation.jobID)])).toEqual([["retry", "job-1"], ["retry", "job-2"]]));
});
