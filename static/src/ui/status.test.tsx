import { cleanup, render, screen } from "@testing-library/react";
import { afterEach, describe, expect, it } from "vitest";
import { ProgressBar } from "./bars";
import { StatusPill } from "./status";

afterEach(cleanup);

describe("the colour of a state (UI-3.12)", () => {
  it.each([
    ["healthy", "good"],
    ["unhealthy", "bad"],
    ["offline", "bad"],
    ["draining", "info"],
    ["pending", "warn"],
    ["loaded", "good"],
    ["loading", "info"],
  ])("of %s is %s, and the word is there", (status, tone) => {
    render(<StatusPill status={status} />);
    expect(screen.getByText(status).classList.contains(tone)).toBe(true);
  });

  it("never stands for a state that is not known: the word does", () => {
    render(<StatusPill status="invented" />);
    expect(screen.getByText("invented").className.trim()).toBe("pill");
  });
});

describe("a percent", () => {
  it.each([
    [99.9, "99"],
    [-4, "0"],
    [140, "100"],
  ])("is a whole number within bounds (UI-0.16, UI-1.7): %d is %s", (value, expected) => {
    render(<ProgressBar value={value} name="Installing echo" />);
    expect(screen.getByRole("progressbar", { name: "Installing echo" }).getAttribute("aria-valuenow")).toBe(expected);
  });
});
