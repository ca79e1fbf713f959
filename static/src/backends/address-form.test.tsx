import { cleanup, fireEvent, render, screen } from "@testing-library/react";
import { afterEach, expect, it, vi } from "vitest";
import { AddressForm } from "./address-form";

afterEach(cleanup);

it("the field to change is marked, and the message describes it", () => {
  const onChoose = vi.fn();
  render(<AddressForm onChoose={onChoose} />);
  const submit = () => fireEvent.click(screen.getByRole("button", { name: "Choose nodes" }));
  const marked = () => screen.getAllByRole("textbox").filter((field) => field.getAttribute("aria-invalid") === "true");
  expect(marked()).toEqual([]);
  submit();
  const address = screen.getByLabelText("Address");
  expect(marked()).toEqual([address]);
  expect(address.getAttribute("aria-describedby")).toBe(screen.getByRole("alert").id);
  fireEvent.change(address, { target: { value: "oci://images.test/mine:1" } });
  const name = screen.getByLabelText("Name (required for images)");
  expect(marked()).toEqual([name]);
  fireEvent.change(name, { target: { value: "mine" } });
  submit();
  expect(marked()).toEqual([]);
  expect(onChoose).toHaveBeenCalledWith({ uri: "oci://images.test/mine:1", name: "mine", alias: "" });
});
