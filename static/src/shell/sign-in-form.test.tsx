import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, expect, it, vi } from "vitest";
import { client } from "../api/client";
import { SignInForm } from "./sign-in-form";

afterEach(cleanup);

/** Types and sends; answers the password's field, and how to refuse. */
async function refused() {
  let refuse: () => void = () => undefined;
  const answer = { error: { error: "no" }, response: new Response(null, { status: 401 }) };
  vi.spyOn(client, "POST").mockReturnValue(new Promise((resolve) => (refuse = () => resolve(answer))));
  render(
    <QueryClientProvider client={new QueryClient()}>
      <Tooltip.Provider>
        <SignInForm name="ada" onSignedIn={vi.fn()} />
      </Tooltip.Provider>
    </QueryClientProvider>,
  );
  const field = screen.getByLabelText<HTMLInputElement>("Password");
  fireEvent.change(field, { target: { value: "mistyped" } });
  fireEvent.click(screen.getByRole("button", { name: "Sign in" }));
  await vi.waitFor(() => expect(client.POST).toHaveBeenCalled());
  return { field, refuse };
}

it("a wrong password is selected, to be typed over", async () => {
  const { field, refuse } = await refused();
  refuse();
  await screen.findByRole("alert");
  expect([field.selectionStart, field.selectionEnd]).toEqual([0, "mistyped".length]);
});

it("one that is typed again before the answer is not", async () => {
  const { field, refuse } = await refused();
  fireEvent.change(field, { target: { value: "rig" } });
  field.setSelectionRange(3, 3);
  refuse();
  await screen.findByRole("alert");
  expect([field.selectionStart, field.selectionEnd]).toEqual([3, 3]);
});
