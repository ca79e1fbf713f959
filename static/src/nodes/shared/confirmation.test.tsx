import { act, cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import type { ReactNode } from "react";
import { afterEach, describe, expect, it, vi } from "vitest";
import { ApiError } from "../../api/client";
import { node } from "../../live/fixtures";
import { Announcer } from "../../ui/announce";
import { ApproveDialog, DrainDialog, ResumeDialog } from "./dialogs";
import * as verbs from "./verbs";

vi.mock("./verbs", { spy: true });

afterEach(() => {
  cleanup();
  vi.useRealTimers();
});

function renderDialog(dialog: ReactNode): void {
  render(
    <Tooltip.Provider>
      {dialog}
      <Announcer />
    </Tooltip.Provider>,
  );
}

function press(name: string): void {
  fireEvent.click(screen.getByRole("button", { name }));
}

const DONE = { message: "" };
const RETIRED = { status: "draining", drain: { since: "", by: "admin", reason: "", own: false, deadline: null, engines_gone_at: null, engines_error: "" } } as const;

describe("nothing is done to a node before it is asked about (UI-3.13)", () => {
  it("draining asks for a reason and a deadline, and sends them", async () => {
    const drain = vi.mocked(verbs.drain).mockResolvedValue(DONE);
    const close = vi.fn();
    renderDialog(<DrainDialog nodes={[node("gpu-1")]} onClose={close} />);
    expect(screen.getByRole("dialog", { name: "Drain gpu-1" })).toBeTruthy();
    fireEvent.change(screen.getByLabelText(/^Reason/), { target: { value: "new disks" } });
    fireEvent.change(screen.getByLabelText(/^Deadline in minutes/), { target: { value: "30" } });
    expect(drain).not.toHaveBeenCalled();
    press("Drain");
    await vi.waitFor(() => expect(close).toHaveBeenCalledOnce());
    expect(drain.mock.calls).toEqual([["gpu-1", "new disks", 30]]);
    expect(screen.getByTestId("announcer").textContent).toBe("1 node set to draining");
  });

  it("approving shows the fingerprint that is approved", async () => {
    const approve = vi.mocked(verbs.approve).mockResolvedValue({ id: "w", name: "w", node_type: "backend", status: "healthy", message: "" });
    renderDialog(<ApproveDialog nodes={[node("w", { status: "pending", fingerprint: "12345678" })]} onClose={vi.fn()} />);
    expect(screen.getByText("1234 5678")).toBeTruthy();
    expect(approve).not.toHaveBeenCalled();
    press("Approve");
    await vi.waitFor(() => expect(approve.mock.calls).toEqual([["w", "12345678"]]));
  });

  it("resuming says what it means", async () => {
    const resume = vi.mocked(verbs.resume).mockResolvedValue(DONE);
    renderDialog(<ResumeDialog nodes={[node("gpu-1", RETIRED)]} onClose={vi.fn()} />);
    expect(screen.getByText(/receives work after/)).toBeTruthy();
    expect(resume).not.toHaveBeenCalled();
    press("Resume");
    await vi.waitFor(() => expect(resume.mock.calls).toEqual([["gpu-1"]]));
  });
});

it("a failure stays where it was caused, with what to do next, until somebody acts (UI-0.11)", async () => {
  vi.useFakeTimers();
  const drain = vi.mocked(verbs.drain).mockRejectedValue(new ApiError("no room for it", 503));
  renderDialog(<DrainDialog nodes={[node("gpu-1")]} onClose={vi.fn()} />);
  press("Drain");
  await act(() => vi.advanceTimersByTimeAsync(10 * 60_000));
  const dialog = screen.getByRole("dialog");
  expect(dialog.textContent).toContain("no room for it");
  expect(dialog.textContent).toContain("Try again shortly.");
  expect(screen.getByTestId("announcer").textContent).toBe("0 nodes set to draining, 1 failed");
  drain.mockResolvedValue(DONE);
  press("Retry");
  await act(() => vi.advanceTimersByTimeAsync(0));
  expect(screen.queryByText(/no room for it/)).toBeNull();
});
