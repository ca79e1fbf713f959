import { describe, expect, it, vi } from "vitest";
import { match, typing, written, type Shortcut } from "./shortcuts";

function shortcut(keys: string): Shortcut {
  return { keys, description: keys, run: vi.fn() };
}

const SHORTCUTS = ["g n", "g a", "/", "?", "mod+k", "j", "x"].map(shortcut);
const PLAIN = { ctrlKey: false, metaKey: false, altKey: false };

describe("the keyboard map", () => {
  it("waits for the second key of a sequence", () => {
    const first = match(SHORTCUTS, "", "g");
    expect(first).toEqual({ hit: null, pending: "g" });
    expect(match(SHORTCUTS, first.pending, "a").hit?.keys).toBe("g a");
  });

  it("takes a key that ends no sequence for itself", () => {
    expect(match(SHORTCUTS, "g", "x").hit?.keys).toBe("x");
    expect(match(SHORTCUTS, "g", "q")).toEqual({ hit: null, pending: "" });
  });

  it("is not disturbed by a key that only changes others", () => {
    expect(match(SHORTCUTS, "g", written({ ...PLAIN, key: "Shift" })).pending).toBe("g");
  });

  it("gives keys taken twice to the one that came last", () => {
    const page = shortcut("/");
    expect(match([...SHORTCUTS, page], "", "/").hit).toBe(page);
  });

  it.each([
    [{ ...PLAIN, key: "k", ctrlKey: true }, "mod+k"],
    [{ ...PLAIN, key: "K", metaKey: true }, "mod+k"],
    [{ ...PLAIN, key: "?" }, "?"],
    [{ ...PLAIN, key: "j", altKey: true }, ""],
    [{ ...PLAIN, key: "Escape" }, "escape"],
  ])("writes %o as %s", (press, expected) => {
    expect(written(press)).toBe(expected);
  });

  it("leaves the keys of fields, menus and dialogs to them", () => {
    document.body.innerHTML = `<input id="a"><div role="dialog"><button id="b"></button></div><button id="c"></button><input type="checkbox" id="d">`;
    const typingStates = ["a", "b", "c", "d"].map((id) => typing(document.getElementById(id)));
    expect(typingStates).toEqual([true, true, false, false]);
  });
});
