// The lines on the screen. They are drawn in parts, of which only the last changes; the browser leaves out the
// painting of those that are not seen. While the reader is at the end, the newest line stays in sight.
import { memo, useCallback, useEffect, useLayoutEffect, useMemo, useRef, type ReactNode, type RefObject } from "react";
import { alike, chunks, pieces, timeOf, type Line } from "./lines";

interface ViewProps {
  lines: readonly Line[];
  term: string;
  details: boolean;
  /** True if the newest line stays in sight. */
  isFollowing: boolean;
  onFollowing: (isFollowing: boolean) => void;
  label: string;
}

/** Pixels from the end that still count as the end. */
const NEAR = 24;
const UPWARDS: ReadonlySet<string> = new Set(["ArrowUp", "PageUp", "Home"]);

export function LogView({ lines, term, details, isFollowing, onFollowing, label }: ViewProps): ReactNode {
  const parts = useMemo(() => chunks(lines), [lines]);
  const { box, content } = useEndInSight(isFollowing, lines, details);
  const top = useRef(0);
  // Upwards only a reader goes: new lines and other heights leave the place, or move it to the end.
  const scrolled = () => {
    const { current } = box;
    if (current === null) return;
    const end = atEnd(current);
    const down = current.scrollTop > top.current;
    if (end !== isFollowing && (end ? down : current.scrollTop < top.current)) onFollowing(end);
    top.current = current.scrollTop;
  };
  // A key or a wheel tells before the first pixel moves. On the way up parts are painted for the first time, and
  // their new heights would take a reader who is still close to the end back to it.
  const goesUp = () => {
    const { current } = box;
    if (isFollowing && current !== null && current.scrollTop > 0) onFollowing(false);
  };
  return (
    // What scrolls takes the focus, so that keys can scroll it. It announces no line: there may be thousands.
    <div
      ref={box}
      className={`log-box ${details ? "" : "plain"} ${isFollowing ? "follows" : ""}`}
      role="log"
      aria-live="off"
      aria-label={label}
      tabIndex={0}
      onScroll={scrolled}
      onWheel={(event) => {
        if (event.deltaY < 0) goesUp();
      }}
      onKeyDown={(event) => {
        if (UPWARDS.has(event.key)) goesUp();
      }}
    >
      <div ref={content}>
        {parts.map((part) => (
          <Part key={part[0]?.number ?? 0} lines={part} term={term} />
        ))}
      </div>
    </div>
  );
}

/** Keeps the newest line in sight while `isFollowing`, also when lines or their details change. */
function useEndInSight(isFollowing: boolean, lines: readonly Line[], details: boolean): Record<"box" | "content", RefObject<HTMLDivElement | null>> {
  const box = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const toEnd = useCallback(() => {
    if (box.current !== null) box.current.scrollTop = box.current.scrollHeight;
  }, []);
  useLayoutEffect(() => {
    if (isFollowing) toEnd();
  }, [isFollowing, lines, details, toEnd]);
  useEffect(() => {
    // A part gets its true height when it is painted for the first time.
    if (!isFollowing || content.current === null) return;
    const observer = new ResizeObserver(toEnd);
    observer.observe(content.current);
    return () => observer.disconnect();
  }, [isFollowing, toEnd]);
  return { box, content };
}

function atEnd(box: HTMLElement): boolean {
  return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
}

interface PartProps {
  lines: readonly Line[];
  term: string;
}

const Part = memo(
  function Part({ lines, term }: PartProps): ReactNode {
    return (
      <div className="log-part" style={{ containIntrinsicBlockSize: `auto ${lines.length * 1.4}em` }}>
        {lines.map((line) => (
          <p key={line.number} className={line.stream}>
            <time dateTime={line.timestamp}>{timeOf(line.timestamp)}</time>
            {line.stream === "stderr" && <span className="visually-hidden">stderr</span>}
            <span dir="auto">
              {pieces(line.text, term).map((piece, at) => (at % 2 === 1 ? <mark key={at}>{piece}</mark> : piece))}
            </span>
          </p>
        ))}
      </div>
    );
  },
  (previous, after) => previous.term === after.term && alike(previous.lines, after.lines),
);
