import { cleanup, render, screen } from "@testing-library/react";
import { MemoryRouter } from "react-router";
import { afterEach, expect, it } from "vitest";
import { Tabs } from "./tabs";
import { TextField } from "./text-field";

afterEach(cleanup);

it("links each part to its address and marks the one that is shown", () => {
  const tabs = [{ to: "/a", title: "First" }, { to: "/a/b", title: "Second", mark: <span>3</span> }];
  render(<MemoryRouter><Tabs label="Parts" tabs={tabs} current="/a/b" /></MemoryRouter>);
  expect(screen.getByRole("navigation", { name: "Parts" })).toBeTruthy();
  const links = screen.getAllByRole("link").map((link) => [link.textContent, link.getAttribute("href"), link.getAttribute("aria-current")]);
  expect(links).toEqual([["First", "/a", null], ["Second3", "/a/b", "page"]]);
});

it("suggests each value once in a field with suggestions", () => {
  const { container } = render(<TextField label="Node" value="" suggestions={["a", "b", "a"]} onChange={() => undefined} />);
  const list = container.querySelector("datalist");
  expect([...(list?.children ?? [])].map((option) => option.getAttribute("value"))).toEqual(["a", "b"]);
  expect(screen.getByLabelText("Node").getAttribute("list")).toBe(list?.id);
});
