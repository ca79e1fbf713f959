import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { type ReactNode } from "react";
import { createMemoryRouter, RouterProvider } from "react-router";
import { afterEach, expect, it, vi } from "vitest";
import { useInAddress } from "./in-address";

afterEach(cleanup);

const read = (query: URLSearchParams) => query.get("q") ?? "";
const write = (term: string) => new URLSearchParams(term === "" ? {} : { q: term });

function Page(): ReactNode {
  const [term, setTerm] = useInAddress(read, write);
  return <input value={term} onChange={(event) => setTerm(event.target.value)} />;
}

function open(path: string) {
  const routes = [
    { path: "/list", element: <Page /> },
    { path: "/one", element: <p>One</p> },
  ];
  const router = createMemoryRouter(routes, { initialEntries: [path] });
  render(<RouterProvider router={router} />);
  return router;
}

const box = () => screen.getByRole("textbox");

function type(text: string): void {
  fireEvent.change(box(), { target: { value: text } });
}

it("keeps every letter, however soon the next one follows", async () => {
  const router = open("/list");
  type("l");
  expect(box()).toHaveProperty("value", "l");
  type("ll");
  expect(box()).toHaveProperty("value", "ll");
  await vi.waitFor(() => expect(router.state.location.search).toBe("?q=ll"));
});

it("a link that is pressed in the same moment is followed, and Back finds what was typed", async () => {
  const router = open("/list?q=a");
  type("ab");
  void router.navigate("/one");
  expect(await screen.findByText("One")).toBeTruthy();
  void router.navigate(-1);
  await vi.waitFor(() => expect(box()).toHaveProperty("value", "ab"));
});

it("a link to the same page with another address wins over what was typed", async () => {
  const router = open("/list?q=a");
  type("ab");
  void router.navigate("/list?q=other");
  await vi.waitFor(() => expect(box()).toHaveProperty("value", "other"));
  expect(router.state.location.search).toBe("?q=other");
});
