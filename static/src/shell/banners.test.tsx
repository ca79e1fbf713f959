import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { MemoryRouter } from "react-router";
import { afterEach, expect, it } from "vitest";
import { LiveContext } from "../live/hooks";
import { LiveStore } from "../live/store";
import { Notices } from "./banners";

afterEach(cleanup);

const NOTICE = { id: "identity-conflicts", level: "warning", text: "2 identity conflicts are open.", hint: "" } as const;

type Notice = Omit<typeof NOTICE, "id" | "level" | "text"> & { id: string; level: "error" | "warning"; text: string };
const WEAK: Notice = { id: "weak-token", level: "warning", text: "The token is weak.", hint: "" };

const HELLO = { type: "hello", at: "2026-08-22T10:00:30Z", version: "1", user: { name: "a", role: "admin" } } as const;

function open(path: string, notices: readonly Notice[], isOutdated = false): void {
  const store = new LiveStore();
  if (isOutdated) for (const build of ["one", "two"]) store.push({ ...HELLO, build });
  store.push({ type: "notices", notices: [...notices] });
  render(
    <LiveContext.Provider value={store}>
      <MemoryRouter initialEntries={[path]}>
        <Notices />
      </MemoryRouter>
    </LiveContext.Provider>,
  );
}

it("leads from any page to where identity conflicts are decided", async () => {
  open("/app/activity", [NOTICE]);
  fireEvent.click(await screen.findByRole("button", { name: `${NOTICE.text} 1 notice` }));
  expect(screen.getByRole("link", { name: "Decide" }).getAttribute("href")).toBe("/app/nodes#conflicts");
});

it("says the text of an identity conflict, also after another warning", async () => {
  open("/app/activity", [WEAK, NOTICE]);
  expect((await screen.findByRole("button", { name: /2 notices/ })).textContent).toContain(NOTICE.text);
});

it("is as bad as the worst notice: an error, then a warning, then information", async () => {
  open("/app/activity", [WEAK], true);
  const button = await screen.findByRole("button", { name: "2 notices" });
  expect(button.className).toMatch(/\bwarning\b/);
  cleanup();
  open("/app/activity", [WEAK, NOTICE, { ...WEAK, id: "e", level: "error", text: "It is down." }]);
  expect((await screen.findByRole("button", { name: "It is down. 3 notices" })).className).toMatch(/\berror\b/);
});

it("is an icon for a configuration warning, and the text of an error (review P9)", async () => {
  open("/app/activity", [WEAK]);
  expect((await screen.findByRole("button", { name: "1 notice" })).textContent.trim()).toBe("1 notice");
});

it("is not repeated on that page itself", async () => {
  open("/app/nodes", [NOTICE]);
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
