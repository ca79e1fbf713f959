import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import type { ReactNode } from "react";
import { MemoryRouter } from "react-router";
import { afterEach, describe, expect, it } from "vitest";
import { Pinned } from "./pinned";

afterEach(cleanup);

function Around({ children }: { children: ReactNode }): ReactNode {
  return (
    <MemoryRouter>
      <Tooltip.Provider>{children}</Tooltip.Provider>
    </MemoryRouter>
  );
}

describe("what is pinned (UI-3.4, UI-3.17, UW18)", () => {
  it("is one line, opens the first few and all on demand, and is put away again without being forgotten", () => {
    const cards = Array.from({ length: 30 }, (_, n) => <li key={n}>worker {n}</li>);
    render(<Pinned id="pending" title="30 workers wait" risk="Look twice." first={3} cards={cards} />, { wrapper: Around });
    expect(screen.queryAllByRole("listitem")).toHaveLength(0);
    fireEvent.click(screen.getByRole("button", { name: "Review 30 workers wait" }));
    expect(screen.getAllByRole("listitem")).toHaveLength(3);
    fireEvent.click(screen.getByText("Show all 30"));
    expect(screen.getAllByRole("listitem")).toHaveLength(30);
    fireEvent.click(screen.getByText("Hide"));
    expect(screen.queryAllByRole("listitem")).toHaveLength(0);
    expect(screen.getByRole("heading").textContent).toBe("30 workers wait");
    expect(screen.getByText("Review").closest("button")?.getAttribute("aria-expanded")).toBe("false");
  });
});
