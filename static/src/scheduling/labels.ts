// The labels of all nodes, searched as forgivingly as people type. Pure.
import { wordsOf } from "../lib/words";
import type { LiveNode } from "../live/messages";
import { listedLabels, written } from "../nodes/shared/labels";

/** Nodes that are shown at first and added with each press. */
export const AT_FIRST = 5;
export const PAGE_SIZE = 20;

/** True if the letters of the word are in the text, together or one after another. */
export function forgiving(text: string, word: string): boolean {
  if (text.includes(word)) return true;
  let at = 0;
  for (const letter of word) {
    at = text.indexOf(letter, at) + 1;
    if (at === 0) return false;
  }
  return true;
}

/** The nodes of which every word is in the name, the id, a key, a value or a `key=value`. */
export function labelled(nodes: readonly LiveNode[], term: string): LiveNode[] {
  const words = wordsOf(term);
  if (words.length === 0) return [...nodes];
  return nodes.filter((node) => {
    const texts = [node.name, node.id, ...listedLabels(node).map(([key, value]) => written(key, value))].map((text) => text.toLowerCase());
    return words.every((word) => texts.some((text) => forgiving(text, word)));
  });
}
