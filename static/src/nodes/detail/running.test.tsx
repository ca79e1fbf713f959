import { cleanup, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { MemoryRouter } from "react-router";
import { afterEach, describe, expect, it } from "vitest";
import { install } from "../../operations/fixtures";
import { Running } from "./running";

afterEach(cleanup);

const NODES = [
  { node_id: "n1", node_name: "n1", status: "success", percentage: 100, current_bytes: 3, total_bytes: 3 },
  { node_id: "n2", node_name: "n2", status: "downloading", percentage: 40 },
  { node_id: "n3", node_name: "n3", status: "error", percentage: 0, error: "no room" },
] as const;

function open(id: string): void {
  const operations = [install("x", { nodes: [...NODES], phase: "downloading" })];
  render(
    <Tooltip.Provider>
      <Running id={id} operations={operations} />
    </Tooltip.Provider>,
    { wrapper: MemoryRouter },
  );
}

describe("an operation on several nodes, on the page of one of them", () => {
  it.each(["n1", "n3"])("says nothing of downloading once it has ended on %s", (id) => {
    open(id);
    expect(screen.getByText("Finished on this node. 2 of 3 nodes finished.")).toBeTruthy();
    expect(screen.queryByRole("progressbar")).toBeNull();
    expect(screen.queryByText("downloading")).toBeNull();
  });

  it("shows this node's own progress until then", () => {
    open("n2");
    expect(screen.getByRole("progressbar").getAttribute("aria-valuenow")).toBe("40");
  });
});
