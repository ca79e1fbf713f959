import { describe, expect, it } from "vitest";
import type { LiveNode } from "../live/messages";
import { installedOn, search, summary, type Entry } from "./catalogue";

function entry(name: string, overrides: Partial<Entry> = {}): Entry {
  return { id: `localai@${name}`, name, description: "", gallery: "localai", tags: [], isAlias: false, isDevelopment: false, variants: [], ...overrides } as Entry;
}

describe("the catalogue", () => {
  const entries = [
    entry("whisper", { description: "speech, echo of words" }),
    entry("echo", { tags: ["test"] }),
    entry("cuda12-echo", { isAlias: true }),
    entry("echo-development", { isDevelopment: true }),
  ];

  it("shows builds and development entries only when asked for", () => {
    const plain = { term: "", builds: false, development: false };
    expect(search(entries, plain).map((entry) => entry.name)).toEqual(["whisper", "echo"]);
    expect(search(entries, { ...plain, builds: true, development: true })).toHaveLength(4);
  });

  it("finds every word in name, description or tag, names first", () => {
    const result = search(entries, { term: "ECHO", builds: false, development: false });
    expect(result.map((entry) => entry.name)).toEqual(["echo", "whisper"]);
    expect(search(entries, { term: "echo test", builds: false, development: false }).map((entry) => entry.name)).toEqual(["echo"]);
  });

  it("counts nodes, not spellings", () => {
    const nodes = [{ backends: ["Echo", "echo"] }, { backends: ["echo"] }] as LiveNode[];
    expect(installedOn(nodes).get("echo")).toBe(2);
  });

  it("shows a description as plain text", () => {
    expect(summary("\n**LLM** by [x](https://e.org) `fast`\nmore")).toBe("LLM by x fast");
  });
});
