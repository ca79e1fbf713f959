import { describe, expect, it } from "vitest";
import { addressOf, appended, asText, chosen, chunks, fileName, MAX_LINES, logAddress, pieces, placeIn, plain, rejoined } from "./lines";

const logLine = (text: string, second = 0, stream: "stdout" | "stderr" = "stdout") => ({
  timestamp: `2026-11-21T00:00:${String(second).padStart(2, "0")}.5Z`, stream, text,
});
const texts = (lines: readonly { text: string }[]) => lines.map((line) => line.text);

describe("the lines that a page keeps (UI-5.2)", () => {
  it("are numbered and bounded", () => {
    const many = appended([], Array.from({ length: MAX_LINES + 5 }, (_, at) => logLine(String(at))));
    expect(many.length).toBe(MAX_LINES);
    expect([many[0]?.text, many[0]?.number]).toEqual(["5", 6]);
    expect(appended(many, [])).toBe(many);
    expect(appended(many, [logLine("x")]).at(-1)?.number).toBe(MAX_LINES + 6);
  });

  it("are not doubled when the connection comes back, and none is lost", () => {
    const previous = appended([], [logLine("a", 1), logLine("b", 2), logLine("c", 3)]);
    expect(texts(rejoined(previous, [logLine("b", 2), logLine("c", 3), logLine("d", 4)]))).toEqual(["a", "b", "c", "d"]);
    expect(texts(rejoined(previous, [logLine("x", 9)]))).toEqual(["a", "b", "c", "x"]);
    expect(rejoined(previous, [])).toBe(previous);
  });

  it("have no colours of a terminal", () => {
    expect(plain("\u001b[1;31mred\u001b[0m \u001b]0;title\u0007and \u001b[2Kplain")).toBe("red and plain");
    expect(plain("a [31m b")).toBe("a [31m b");
  });
});

describe("what is shown of a log (UI-5.4)", () => {
  const lines = appended([], [logLine("Loading GGUF"), logLine("loaded", 1, "stderr"), logLine("ready", 2)]);

  it("is what contains the term, in the chosen stream", () => {
    expect(texts(chosen(lines, { term: "LOAD", stream: "" }))).toEqual(["Loading GGUF", "loaded"]);
    expect(texts(chosen(lines, { term: "load", stream: "stderr" }))).toEqual(["loaded"]);
    expect(chosen(lines, { term: "", stream: "" })).toBe(lines);
  });

  it("marks what was searched for, as text", () => {
    expect(pieces("Load, load <b>", "LOAD")).toEqual(["", "Load", ", ", "load", " <b>"]);
    expect(pieces("none", "x")).toEqual(["none"]);
    expect(pieces("İi", "i")).toEqual(["İi"]);
  });

  it("is drawn in parts that stay the same", () => {
    const many = appended([], Array.from({ length: 450 }, (_, at) => logLine(String(at))));
    const [first, second] = [chunks(many), chunks(appended(many, [logLine("new")]))];
    expect(first.map((part) => part.length)).toEqual([199, 200, 51]);
    expect(second.map((part) => part.length)).toEqual([199, 200, 52]);
  });

  it("is in the address", () => {
    const place = { of: "org/model#0", term: "a b", stream: "stderr" } as const;
    expect(placeIn(new URLSearchParams(addressOf(place).toString()))).toEqual(place);
    expect(placeIn(new URLSearchParams("stream=nonsense"))).toEqual({ of: "", term: "", stream: "" });
    expect(logAddress("n1", "org/model#0")).toBe("/app/nodes/n1/logs?of=org%2Fmodel%230");
    expect(logAddress("n1")).toBe("/app/nodes/n1/logs");
  });
});

it("a download is the text of what is shown, under a safe name (UI-5.5)", () => {
  const lines = appended([], [logLine("one"), logLine("two", 1, "stderr")]);
  expect(asText(lines)).toBe("2026-11-21T00:00:00.5Z stdout one\n2026-11-21T00:00:01.5Z stderr two\n");
  expect(fileName("gpu/../a", "org/m#0", new Date("2026-11-21T01:02:03Z"))).toBe("gpu-..-a-org-m-0-2026-11-21T010203.log");
});
