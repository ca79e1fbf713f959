import { cleanup, fireEvent, render, screen, within } from "@testing-library/react";
import { useState, type ReactNode } from "react";
import { afterEach, describe, expect, it } from "vitest";
import { DateField, fieldOf, isoOf } from "./date-field";

afterEach(cleanup);

function Filter({ initial = "" }: { initial?: string }): ReactNode {
  const [value, setValue] = useState(initial);
  return (
    <>
      <DateField label="Ended after" value={value} onChange={setValue} />
      <output>{value}</output>
      <button onClick={() => setValue("")}>Clear</button>
    </>
  );
}

const field = () => screen.getByLabelText<HTMLInputElement>("Ended after");
const value = () => screen.getByRole("status").textContent;
const type = (text: string) => {
  fireEvent.focus(field());
  fireEvent.change(field(), { target: { value: text } });
  fireEvent.blur(field());
};
const at = (...parts: [number, number, number, number, number]) => new Date(...parts).toISOString();

it("has times in this browser's zone, to the minute and back", () => {
  const iso = at(2026, 7, 2, 9, 5);
  expect(fieldOf(iso)).toBe("2026-08-02 09:05");
  expect([isoOf("2026-08-02 09:05"), isoOf(" 2026-08-02T09:05 "), isoOf("2026-08-02")]).toEqual([iso, iso, at(2026, 7, 2, 0, 0)]);
  for (const text of ["", "2026-13", "2026-13-01", "2026-02-30", "2026-08-02 25:00", "yesterday", "2026-08-02 9"]) expect(isoOf(text)).toBe("");
});

describe("a date field", () => {
  it("keeps what is typed, and says once it is left that it is no date", () => {
    render(<Filter />);
    type("2026-08-02");
    expect([field().value, value()]).toEqual(["2026-08-02", at(2026, 7, 2, 0, 0)]);
    type("2026-08-0");
    expect([field().value, value(), field().getAttribute("aria-invalid")]).toEqual(["2026-08-0", "", "true"]);
    expect(screen.getByRole("alert").textContent).toBe("Not a date. Use the format YYYY-MM-DD HH:MM.");
    fireEvent.focus(field());
    expect(screen.queryByRole("alert")).toBeNull();
  });

  it("shows the value that it is given from outside", () => {
    render(<Filter initial={at(2026, 7, 2, 9, 5)} />);
    expect(field().value).toBe("2026-08-02 09:05");
    fireEvent.click(screen.getByText("Clear"));
    expect(field().value).toBe("");
  });

  it("takes the day from a calendar and keeps the time; the focus starts at the chosen day", async () => {
    render(<Filter initial={at(2026, 7, 2, 9, 5)} />);
    fireEvent.click(screen.getByRole("button", { name: "Ended after: choose a day" }));
    const calendar = within(await screen.findByRole("dialog", { name: "Ended after: calendar" }));
    const chosen = await calendar.findByRole("button", { name: /2 August 2026, selected/ });
    await expect.poll(() => document.activeElement).toBe(chosen);
    fireEvent.keyDown(chosen, { key: "ArrowDown" });
    const next = calendar.getByRole("button", { name: / 9 August 2026/ });
    expect(document.activeElement).toBe(next);
    fireEvent.click(next);
    expect([field().value, value()]).toEqual(["2026-08-09 09:05", at(2026, 7, 9, 9, 5)]);
    expect(screen.queryByRole("dialog")).toBeNull();
  });
});
