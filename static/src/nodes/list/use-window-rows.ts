// Virtual rows that scroll with the page: only what is near the window is in the document.
import { defaultRangeExtractor, useWindowVirtualizer, type Range, type VirtualItem } from "@tanstack/react-virtual";
import { useCallback, useLayoutEffect, useState, type RefObject } from "react";
import type { LiveNode } from "../../live/messages";

interface WindowRows {
  items: VirtualItem[];
  height: number;
  /** The start of the rows on the page. */
  margin: number;
  /** Brings a row into the window. */
  reveal: (index: number) => void;
  measure: (element: Element | null) => void;
}

interface Options {
  list: RefObject<HTMLElement | null>;
  nodes: readonly LiveNode[];
  rowHeight: number;
  /** This row stays in the document, because the focus may be in it; -1 for none. */
  pinnedRow: number;
  /** Pixels of the window's top that are covered. */
  covered?: number;
}

export function useWindowRows({ list, nodes, rowHeight, pinnedRow, covered = 0 }: Options): WindowRows {
  const margin = useTop(list);
  const rangeExtractor = useCallback(
    (range: Range) => {
      const rows = defaultRangeExtractor(range);
      if (pinnedRow < 0 || pinnedRow >= range.count || rows.includes(pinnedRow)) return rows;
      return [...rows, pinnedRow].sort((left, right) => left - right);
    },
    [pinnedRow],
  );
  const virtual = useWindowVirtualizer({
    count: nodes.length,
    estimateSize: () => rowHeight,
    overscan: 6,
    scrollMargin: margin,
    scrollPaddingStart: covered,
    scrollPaddingEnd: rowHeight,
    getItemKey: (index) => nodes[index]?.id ?? index,
    rangeExtractor,
    // Rows are drawn with the next frame; drawing them inside the scroll event makes React complain.
    useFlushSync: false,
  });
  return {
    items: virtual.getVirtualItems(),
    height: virtual.getTotalSize(),
    margin,
    reveal: (index) => virtual.scrollToIndex(index, { align: "auto" }),
    measure: virtual.measureElement,
  };
}

/** Distance of the element from the top of the page; content above it may grow at any time. */
function useTop(element: RefObject<HTMLElement | null>): number {
  const [top, setTop] = useState(0);
  useLayoutEffect(() => {
    const measure = () => {
      if (element.current !== null) setTop(Math.round(element.current.getBoundingClientRect().top + window.scrollY));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(document.body);
    return () => observer.disconnect();
  }, [element]);
  return top;
}
