import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { useRef, useState, type ReactNode } from "react";
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

function Above({ shown }: { shown: boolean }): ReactNode {
  const below = useRef<HTMLButtonElement>(null);
  return (
    <Tooltip.Provider>
      <Dialog open onClose={nothing} title="Drain" first={below}>
        <button ref={below}>Below</button>
      </Dialog>
      <Dialog open={shown} onClose={nothing} title="Sign in">
        <input autoFocus data-first aria-label="Password" />
      </Dialog>
    </Tooltip.Provider>
  );
}

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

  it("starts in the field that is marked, also above a dialog that holds it", async () => {
    const { rerender } = render(<Above shown={false} />);
    await expect.poll(() => document.activeElement).toBe(screen.getByText("Below"));
    rerender(<Above shown />);
    await expect.poll(() => document.activeElement).toBe(screen.getByLabelText("Password"));
  });

  it("stays in a dialog that opened meanwhile, and selects nothing of what was typed there", async () => {
    const both = (first: boolean) => (
      <Tooltip.Provider>
        <Dialog open={first} onClose={nothing} title="Drain">
          <button>Below</button>
        </Dialog>
        <Dialog open={!first} onClose={nothing} title="Search">
          <input autoFocus data-first aria-label="Query" />
        </Dialog>
      </Tooltip.Provider>
    );
    const returns: Event[] = [];
    const { rerender } = render(<main id="main" tabIndex={-1}>{both(true)}</main>);
    screen.getByRole("dialog").addEventListener("focusScope.autoFocusOnUnmount", (event) => returns.push(event));
    rerender(<main id="main" tabIndex={-1}>{both(false)}</main>);
    const query = screen.getByLabelText<HTMLInputElement>("Query");
    fireEvent.change(query, { target: { value: "install" } });
    query.setSelectionRange(7, 7);
    await expect.poll(() => returns).toHaveLength(1);
    expect(document.activeElement).toBe(query);
    expect(query.selectionStart).toBe(7);
  });

  it.each([
    ["starts on Cancel before something is lost", { danger: true }, () => screen.getByText("Cancel")],
    ["starts on the answer otherwise", {}, () => screen.getByText("Do it")],
    ["starts in the field if a word is wanted", { danger: true, typed: "gpu-1" }, () => screen.getByRole("textbox")],
  ])("%s", (_, overrides, expected) => {
    render(
      <Opener>
        {(shown, close) => (
          <Confirm open={shown} onClose={close} title="Sure?" action="Do it" onConfirm={nothing} {...overrides}>
            It will happen.
          </Confirm>
        )}
      </Opener>,
    );
    open();
    expect(document.activeElement).toBe(expected());
  });
});
