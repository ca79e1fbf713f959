// Markdown that grows, divided into its blocks: paragraphs, lists, code. A block is finished once another one has begun
// after it; it is never read or drawn again, so a long answer costs no more for each token than a short one. Pure.
import { fromMarkdown } from "mdast-util-from-markdown";

export interface Blocks {
  done: readonly string[];
  /** The last block, which may go on. */
  tail: string;
}

export const NO_BLOCKS: Blocks = { done: [], tail: "" };

/** The blocks with `more` at the end. A reference to a definition in another block stays text. */
export function grown({ done, tail }: Blocks, addition: string): Blocks {
  if (addition === "") return { done, tail };
  const text = tail + addition;
  // A new block begins on a new line.
  if (!text.trimStart().includes("\n")) return { done, tail: text };
  const starts = fromMarkdown(text).children.map((child) => lineOf(text, child.position?.start.offset ?? 0));
  const cuts = starts.slice(1);
  const parts = cuts.map((cut, at) => text.slice(at === 0 ? 0 : cuts[at - 1], cut));
  return { done: parts.length === 0 ? done : [...done, ...parts], tail: text.slice(cuts.at(-1) ?? 0) };
}

/** The start of the line: the spaces before a block belong to it. */
function lineOf(text: string, offset: number): number {
  return text.lastIndexOf("\n", offset - 1) + 1;
}

export function textOf({ done, tail }: Blocks): string {
  return done.join("") + tail;
}
