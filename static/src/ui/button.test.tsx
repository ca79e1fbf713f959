import { cleanup, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, expect, it } from "vitest";
import { Button } from "./button";

afterEach(cleanup);

it("keeps the focus when it cannot be pressed any more, and when it can again", () => {
  const shown = (refusal: string) => (
    <Tooltip.Provider>
      <Button refusal={refusal}>Retry</Button>
    </Tooltip.Provider>
  );
  const { rerender } = render(shown(""));
  const button = screen.getByRole("button");
  button.focus();
  for (const refusal of ["on its way", ""]) {
    rerender(shown(refusal));
    expect(document.activeElement).toBe(button);
    expect(button.getAttribute("aria-disabled")).toBe(refusal === "" ? null : "true");
  }
});
