// Draws expensive content after the frame that answers a press: the page's head is visible at once. After Back all
// of it is drawn at once, because the browser restores the scroll position at once.
import { useEffect, useState, type ReactNode } from "react";
import { NavigationType, useNavigationType } from "react-router";

export function AfterPaint({ children }: { children: ReactNode }): ReactNode {
  const [painted, setPainted] = useState(useNavigationType() === NavigationType.Pop);
  useEffect(() => {
    // The first frame begins before the paint, the second one after it.
    let frame = requestAnimationFrame(() => (frame = requestAnimationFrame(() => setPainted(true))));
    return () => cancelAnimationFrame(frame);
  }, []);
  return painted ? children : null;
}
