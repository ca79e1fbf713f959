// Keeps the end of the document in sight while it grows, until the reader scrolls up.
import { useEffect, useLayoutEffect, useRef, useState } from "react";

/** This near to the end counts as at it, in px. */
const NEAR = 48;

function toEnd(): void {
  window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}

/** `version`: what has to change for the document to have grown. Answers whether the reader is elsewhere, and how to come back. */
export function useFollow(version: unknown): { away: boolean; jump: () => void } {
  const [away, setAway] = useState(false);
  const top = useRef(0);
  useEffect(() => {
    const scrolled = () => {
      const { scrollHeight } = document.documentElement;
      const atEnd = scrollHeight - window.scrollY - window.innerHeight < NEAR;
      // What shrinks moves the document up as well, and ends at its end.
      if (atEnd) setAway(false);
      else if (window.scrollY < top.current) setAway(true);
      top.current = window.scrollY;
    };
    window.addEventListener("scroll", scrolled, { passive: true });
    return () => window.removeEventListener("scroll", scrolled);
  }, []);
  useLayoutEffect(() => {
    if (!away) toEnd();
  }, [version, away]);
  return { away, jump: () => setAway(false) };
}
