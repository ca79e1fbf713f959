// Media queries, for what style sheets cannot do.
import { useSyncExternalStore } from "react";

/** The widths at which the layout changes (§2.0). */
export const PHONE = "(max-width: 639px)";
export const RAIL = "(min-width: 640px) and (max-width: 1023px)";

/** Follows a media query. */
export function useMedia(query: string): boolean {
  return useSyncExternalStore(
    (listener) => {
      const list = window.matchMedia(query);
      list.addEventListener("change", listener);
      return () => list.removeEventListener("change", listener);
    },
    () => window.matchMedia(query).matches,
  );
}
