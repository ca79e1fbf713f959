// How much width a pinned section asks for: as much as its cards, up to a row of three.
import type { CSSProperties } from "react";

const ROW = 3;

/** The style that tells the stylesheet how many cards stand side by side. */
export function room(cards: number): CSSProperties {
  return { "--cards": Math.min(Math.max(cards, 1), ROW) } as CSSProperties;
}
