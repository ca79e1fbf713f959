import { act, cleanup, render, screen } from "@testing-library/react";
import { createMemoryRouter, Outlet, RouterProvider } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { AfterPaint } from "./after-paint";

let frames: (() => void)[] = [];

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

function open() {
  frames = [];
  vi.stubGlobal("requestAnimationFrame", (run: () => void) => frames.push(run));
  vi.stubGlobal("cancelAnimationFrame", () => undefined);
  const heavy = (
    <>
      <h1>Head</h1>
      <AfterPaint>Body</AfterPaint>
    </>
  );
  const router = createMemoryRouter([{ path: "/", element: <Outlet />, children: [{ path: "list", element: null }, { path: "one", element: heavy }] }], {
    initialEntries: ["/list"],
  });
  render(<RouterProvider router={router} />);
  return router;
}

const nextFrame = () => act(() => frames.shift()?.());

it("draws the body after the frame in which the head is seen", async () => {
  const router = open();
  await act(() => router.navigate("/one"));
  expect(screen.getByRole("heading")).toBeTruthy();
  nextFrame();
  expect(screen.queryByText("Body")).toBeNull();
  nextFrame();
  expect(screen.getByText("Body")).toBeTruthy();
});

it("draws it at once for anyone who comes back", async () => {
  const router = open();
  await act(() => router.navigate("/one"));
  await act(() => router.navigate("/list"));
  await act(() => router.navigate(-1));
  expect(screen.getByText("Body")).toBeTruthy();
});
