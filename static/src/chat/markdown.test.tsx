import { cleanup, render, screen } from "@testing-library/react";
import { Tooltip } from "radix-ui";
import { afterEach, describe, expect, it } from "vitest";
import { grown, NO_BLOCKS } from "./blocks";
import { Rendered } from "./markdown";

afterEach(cleanup);

function shown(text: string): HTMLElement {
  const { container } = render(<Tooltip.Provider><Rendered blocks={grown(NO_BLOCKS, text)} /></Tooltip.Provider>);
  return container;
}

/** What could do something: elements and attributes. */
function active(element: HTMLElement): string[] {
  const descendants = [...element.querySelectorAll("*")];
  const elements = descendants.map((element) => element.tagName.toLowerCase()).filter((name) => /script|iframe|object|embed|form|img|svg|style|link|meta|base|video|audio|input/.test(name));
  const attributes = descendants.flatMap((element) => element.getAttributeNames()).filter((name) => name.startsWith("on") || name === "src" || name === "srcdoc" || name === "id");
  return [...elements, ...attributes];
}

const HOSTILE: Readonly<Record<string, string>> = {
  script: "<script>alert(1)</script>",
  handler: '<img src=x onerror="alert(1)">',
  frame: '<iframe srcdoc="<script>alert(1)</script>"></iframe>',
  svg: "<svg onload=alert(1)><a href='javascript:alert(1)'>x</a></svg>",
  inline: "text <b onclick=alert(1)>bold</b> <style>*{display:none}</style>",
  "script link": "[x](javascript:alert(1))",
  "script link in disguise": "[x](JaVaScRiPt&colon;alert(1)) [y](\u0001javascript:alert(1)) [z](java\tscript:alert(1))",
  "reference to a script": "[x][y]\n\n[y]: javascript:alert(1)",
  "data link": "[x](data:text/html;base64,PHNjcmlwdD4=) [y](vbscript:x) [z](file:///etc/passwd)",
  "angle link": "<javascript:alert(1)>",
  "link into the page": "[x](/api/nodes) [y](//elsewhere.test/z) [z](?model=a)",
  picture: "![a picture](https://elsewhere.test/track.png) ![](data:image/svg+xml,<svg/onload=alert(1)>)",
  "picture in a link": "[![x](javascript:alert(1))](javascript:alert(2))",
  "task list": "- [x] done\n- [ ] open",
  footnote: "Text[^1]\n\n[^1]: note",
  "code with markup": "```html\n<script>alert(1)</script>\n```",
  unfinished: "```\n<script>",
  table: "| <script>alert(1)</script> | [x](javascript:alert(1)) |\n|---|---|\n| a | b |",
  "heading with an id": "# <a id=root>x</a>",
};

describe("text of a model (UI-10.4)", () => {
  it.each(Object.keys(HOSTILE))("does nothing: %s", (name) => {
    const element = shown(HOSTILE[name] ?? "");
    expect(active(element)).toEqual([]);
    for (const link of element.querySelectorAll("a")) {
      expect(link.getAttribute("href")).toMatch(/^https:\/\/elsewhere\.test\/track/);
      expect(link.getAttribute("rel")).toBe("noopener noreferrer nofollow");
    }
  });

  it("shows HTML as text", () => {
    expect(shown("a <b>c</b>").textContent).toBe("a <b>c</b>");
    expect(shown(HOSTILE.script ?? "").textContent).toBe("<script>alert(1)</script>");
  });

  it("has links that lead out without a way back, tables, lists and code to copy", () => {
    const element = shown("[doc](https://example.org/a?b=1#c) <me@example.org>\n\n| a |\n|---|\n| 1 |\n\n1. one\n\n```py\nif 1 < 2:\n\tpass\n```\n");
    expect(screen.getByRole("link", { name: "doc" }).getAttribute("href")).toBe("https://example.org/a?b=1#c");
    expect(screen.getByRole("link", { name: "me@example.org" }).getAttribute("href")).toBe("mailto:me@example.org");
    expect(element.querySelector("td")?.textContent).toBe("1");
    expect(element.querySelector("ol > li")?.textContent).toBe("one");
    expect(element.querySelector("pre")?.textContent).toBe("if 1 < 2:\n\tpass");
    expect(screen.getByRole("button", { name: "Copy code" })).toBeTruthy();
  });

  it("keeps the elements of blocks that are finished while the last one grows", () => {
    const first = grown(NO_BLOCKS, "# One\n\ntwo");
    const { container, rerender } = render(<Rendered blocks={first} />);
    const heading = container.querySelector(".chat-heading");
    rerender(<Rendered blocks={grown(first, " and more\n\nthree")} />);
    expect(container.querySelector(".chat-heading")).toBe(heading);
    expect(container.textContent.replaceAll("\n", "")).toBe("Onetwo and morethree");
  });
});
