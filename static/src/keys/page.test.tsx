import { cleanup, fireEvent, screen, waitFor } from "@testing-library/react";
import { createMemoryRouter } from "react-router";
import { afterEach, expect, it } from "vitest";
import { stage } from "../live/stage";
import { LiveStore } from "../live/store";
import { answerBy } from "../models/model-fixtures";
import { KeysPage } from "./page";

afterEach(cleanup);

it("explains at the field that a name is too long, and sends nothing", async () => {
  const sent = answerBy((path) => (path === "/api/models/capabilities" ? { data: [] } : { keys: [] }));
  stage(new LiveStore(), createMemoryRouter([{ path: "*", element: <KeysPage /> }]));
  await screen.findByText("You have no API keys.");
  const field = screen.getByLabelText("Name of a new key");
  fireEvent.change(field, { target: { value: "x".repeat(101) } });
  fireEvent.submit(field);
  expect(field.getAttribute("aria-invalid")).toBe("true");
  expect(screen.getByText("A name can have at most 100 characters.")).toBeTruthy();
  expect(sent.filter(([method]) => method === "POST")).toEqual([]);
});

it("shows a new key until Done, replaces it by no other, and keeps it nowhere afterwards", async () => {
  const sent = answerBy((path, _, method) => {
    if (path === "/api/models/capabilities") return { data: [] };
    return method === "POST" ? { id: "1", name: "laptop", key: "lc-secret", keyPrefix: "lc-", createdAt: "2026-08-22T10:00:00Z" } : { keys: [] };
  });
  const queries = stage(new LiveStore(), createMemoryRouter([{ path: "*", element: <KeysPage /> }]));
  const field = screen.getByLabelText("Name of a new key");
  const create = screen.getByRole("button", { name: "Create key" });
  fireEvent.change(field, { target: { value: "laptop" } });
  fireEvent.click(create);
  expect(await screen.findByText("lc-secret")).toBeTruthy();
  fireEvent.change(field, { target: { value: "other" } });
  fireEvent.click(create);
  expect(create.getAttribute("aria-disabled")).toBe("true");
  expect(sent).toHaveLength(1);
  fireEvent.click(screen.getByRole("button", { name: "Done" }));
  await waitFor(() => expect(queries.getMutationCache().getAll()).toEqual([]));
  expect(screen.queryByText("lc-secret")).toBeNull();
});
