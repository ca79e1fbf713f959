import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { keepFocus } from "./keep-focus";

let stop: () => void;

beforeEach(() => {
  document.body.innerHTML = `<main id="main" tabindex="-1"><section id="failures"><article id="card"><button>Dismiss</button></article><p>more</p></section></main>`;
  stop = keepFocus();
});
afterEach(() => stop());

function part(selector: string): HTMLElement {
  return document.querySelector(selector) as HTMLElement;
}

describe("what had the focus goes", () => {
  it.each([
    ["#card", "failures"],
    ["#failures", "main"],
  ])("with %s: the focus goes on to %s", async (removed, expected) => {
    part("button").focus();
    part(removed).remove();
    await vi.waitFor(() => expect(document.activeElement?.id).toBe(expected));
  });

  it("and somebody else takes the focus: it stays there", async () => {
    part("button").focus();
    part("#card").innerHTML = `<input>`;
    part("input").focus();
    await new Promise((done) => setTimeout(done, 100));
    expect(document.activeElement).toBe(part("input"));
  });

  it("after somebody left it for nothing: nothing takes the focus", async () => {
    part("button").focus();
    part("button").blur();
    await new Promise((done) => setTimeout(done, 10));
    part("#card").remove();
    await new Promise((done) => setTimeout(done, 100));
    expect(document.activeElement).toBe(document.body);
  });
});
