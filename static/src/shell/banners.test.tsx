import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { MemoryRouter } from "react-router";
import { afterEach, expect, it } from "vitest";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { Notices } from "./banners";

afterEach(cleanup);

const NOTICE = { id: "identity-conflicts", level: "warning", text: "2 identity conflicts are open.", hint: "" } as const;

function open(path: string): void {
  const store = new LiveStore();
  store.push({ type: "notices", notices: [NOTICE] });
  render(
    <LiveContext.Provider value={store}>
      <MemoryRouter initialEntries={[path]}>
        <Notices />
      </MemoryRouter>
    </LiveContext.Provider>,
  );
}

it("leads from any page to where identity conflicts are decided", async () => {
  open("/app/activity");
  fireEvent.click(await screen.findByRole("button", { name: "1 notice" }));
  await screen.findByText(NOTICE.text);
  expect(screen.getByRole("link", { name: "Decide" }).getAttribute("href")).toBe("/app/nodes#conflicts");
});

it("is an icon for a configuration warning, and the text of an error (review P9)", async () => {
  open("/app/activity");
  expect((await screen.findByRole("button", { name: "1 notice" })).textContent.trim()).toBe("1 notice");
});

it("is not repeated on that page itself", async () => {
  open("/app/nodes");
  await new Promise((resolve) => setTimeout(resolve, 300));
  expect(screen.queryByText(NOTICE.text)).toBeNull();
});

it("leads to the system's health from what is missing", async () => {
  const store = new LiveStore();
  store.push({ type: "notices", notices: [{ id: "no-tasks", level: "error", text: "No task process is running.", hint: "" }] });
  render(
    <LiveContext.Provider value={store}>
      <MemoryRouter initialEntries={["/app/nodes"]}>
        <Notices />
      </MemoryRouter>
    </LiveContext.Provider>,
  );
  fireEvent.click(await screen.findByRole("button", { name: "No task process is running. 1 notice" }));
  const link = await screen.findByRole("link", { name: "System health" });
  expect(link.getAttribute("href")).toBe("/app/health");
});
