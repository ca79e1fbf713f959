import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, expect, it, vi } from "vitest";
import { node } from "../../live/fixtures";
import * as calls from "../../operations/calls";
import { ResumeDialog } from "./dialogs";
import * as verbs from "./verbs";

vi.mock("./verbs", { spy: true });
vi.mock("../../operations/calls", { spy: true });

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

it.each([false, true])("an operation that was stopped before the server named it is cancelled then, also when the dialog is closed: %s (review R2)", async (closes) => {
  let answer: (value: { jobID: string; statusUrl: string; message: string }) => void = () => undefined;
  vi.mocked(verbs.onAll).mockReturnValue(new Promise((resolve) => (answer = resolve)));
  const cancel = vi.mocked(calls.cancel).mockResolvedValue({ success: true, message: "" });
  const nodes = ["n1", "n2"].map((name) => node(name, { status: "offline" }));
  const { unmount } = render(
    <Tooltip.Provider>
      <ResumeDialog nodes={nodes} onClose={vi.fn()} />
    </Tooltip.Provider>,
  );
  fireEvent.click(screen.getByRole("button", { name: "Resume 2 nodes" }));
  if (closes) fireEvent.keyDown(screen.getByRole("dialog"), { key: "Escape" });
  else fireEvent.click(await screen.findByRole("button", { name: "Stop" }));
  await screen.findAllByRole("button", { name: "Close" });
  expect(screen.queryByRole("button", { name: "Stop" })).toBeNull();
  expect(cancel).not.toHaveBeenCalled();
  if (closes) unmount();
  answer({ jobID: "job", statusUrl: "", message: "" });
  await vi.waitFor(() => expect(cancel).toHaveBeenCalledWith({ jobID: "job" }));
  cancel.mockClear();
});
