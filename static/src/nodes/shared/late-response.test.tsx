import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, expect, it, vi } from "vitest";
import { node } from "../../live/fixtures";
import { ResumeDialog } from "./dialogs";
import * as verbs from "./verbs";

vi.mock("./verbs", { spy: true });

afterEach(cleanup);

it("a dialog whose request is not answered can be left, and the late answer closes nothing else (UW16)", async () => {
  let answer: (value: { message: string }) => void = () => undefined;
  vi.mocked(verbs.resume).mockReturnValue(new Promise((resolve) => (answer = resolve)));
  const close = vi.fn();
  const { unmount } = render(
    <Tooltip.Provider>
      <ResumeDialog nodes={[node("n1", { status: "offline" })]} onClose={close} />
    </Tooltip.Provider>,
  );
  fireEvent.click(screen.getByRole("button", { name: "Resume" }));
  fireEvent.click(await screen.findByRole("button", { name: "Stop" }));
  fireEvent.click(screen.getAllByRole("button", { name: "Close" }).at(-1) as HTMLElement);
  expect(close).toHaveBeenCalledOnce();
  unmount();
  answer({ message: "" });
  await Promise.resolve();
  expect(close).toHaveBeenCalledOnce();
});
