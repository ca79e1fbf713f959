import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { useState, type ReactNode } from "react";
import { createMemoryRouter, RouterProvider } from "react-router";
import { afterEach, describe, expect, it, vi } from "vitest";
import { isMissingCode, PageError } from "./boundary";

afterEach(cleanup);

describe("a page that fails", () => {
  it.each([
    ["Failed to fetch dynamically imported module: http://x/a.js", true],
    ["error loading dynamically imported module: http://x/a.js", true],
    ["Importing a module script failed.", true],
    ["Cannot read properties of undefined", false],
  ])("for %s is missing code: %s", (message, missing) => {
    expect(isMissingCode(new TypeError(message))).toBe(missing);
  });

  it("says so and is there again after a retry", async () => {
    vi.spyOn(console, "error").mockImplementation(() => undefined);
    let broken = true;
    function Page(): ReactNode {
      const [text] = useState(() => {
        if (broken) throw new Error("a figure was missing");
        return "the page";
      });
      return <p>{text}</p>;
    }
    const router = createMemoryRouter([{ path: "/", element: <Page />, errorElement: <PageError /> }]);
    render(
      <Tooltip.Provider>
        <RouterProvider router={router} />
      </Tooltip.Provider>,
    );
    expect(screen.getByRole("alert").textContent).toContain("a figure was missing");
    broken = false;
    fireEvent.click(screen.getByRole("button", { name: "Try again" }));
    expect(await screen.findByText("the page")).toBeTruthy();
  });
});
