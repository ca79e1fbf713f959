import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, describe, expect, it } from "vitest";
import { Pinned } from "./pinned";

afterEach(cleanup);

describe("what is pinned (UI-3.4)", () => {
  it("opens the first few, all on demand, and is put away without being forgotten", () => {
    const cards = Array.from({ length: 30 }, (_, n) => <li key={n}>worker {n}</li>);
    render(<Pinned id="pending" title="30 workers wait" risk="Look twice." first={3} cards={cards} />, {
      wrapper: Tooltip.Provider,
    });
    expect(screen.getAllByRole("listitem")).toHaveLength(3);
    fireEvent.click(screen.getByText("Show all 30"));
    expect(screen.getAllByRole("listitem")).toHaveLength(30);
    fireEvent.click(screen.getByText("Hide"));
    expect(screen.queryAllByRole("listitem")).toHaveLength(0);
    expect(screen.getByRole("heading").textContent).toBe("30 workers wait");
    expect(screen.getByText("Show").closest("button")?.getAttribute("aria-expanded")).toBe("false");
  });
});
