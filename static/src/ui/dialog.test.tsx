import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { useState, type ReactNode } from "react";
import { afterEach, describe, expect, it } from "vitest";
import { Confirm, Dialog } from "./dialog";

afterEach(cleanup);

function Opener({ children }: { children: (open: boolean, close: () => void) => ReactNode }): ReactNode {
  const [open, setOpen] = useState(false);
  return (
    <Tooltip.Provider>
      <main id="main" tabIndex={-1}>
        <button onClick={() => setOpen(true)}>Open</button>
        {children(open, () => setOpen(false))}
      </main>
    </Tooltip.Provider>
  );
}

function open(): HTMLElement {
  const button = screen.getByText("Open");
  button.focus();
  fireEvent.click(button);
  return button;
}

const nothing = () => undefined;

describe("the focus of dialogs (UI-0.12, UI-0.13)", () => {
  it("returns to the opener, also when a field inside took it at once", async () => {
    render(
      <Opener>
        {(shown, close) => (
          <Dialog open={shown} onClose={close} title="Choose">
            <input autoFocus aria-label="Name" />
          </Dialog>
        )}
      </Opener>,
    );
    const opener = open();
    expect(document.activeElement).toBe(screen.getByLabelText("Name"));
    fireEvent.keyDown(screen.getByLabelText("Name"), { key: "Escape" });
    await expect.poll(() => document.activeElement).toBe(opener);
  });

  it.each([
    ["starts on Cancel before something is lost", { danger: true }, () => screen.getByText("Cancel")],
    ["starts on the answer otherwise", {}, () => screen.getByText("Do it")],
    ["starts in the field if a word is wanted", { danger: true, typed: "gpu-1" }, () => screen.getByRole("textbox")],
  ])("%s", (_, more, wanted) => {
    render(
      <Opener>
        {(shown, close) => (
          <Confirm open={shown} onClose={close} title="Sure?" action="Do it" onConfirm={nothing} {...more}>
            It will happen.
          </Confirm>
        )}
      </Opener>,
    );
    open();
    expect(document.activeElement).toBe(wanted());
  });
});
