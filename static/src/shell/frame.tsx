// What the frames of all signed-in people share: the keys, the focus, and the way past the navigation.
import { useEffect, useRef, type MouseEvent, type ReactNode } from "react";
import { useLocation } from "react-router";
import { keepFocus } from "../ui/keep-focus";
import { listen } from "../ui/shortcuts";

/** Listens to the keys and watches over the focus. */
export function useFrame(): void {
  useEffect(listen, []);
  useEffect(keepFocus, []);
  useFocusOnNavigation();
}

export function SkipLink(): ReactNode {
  return (
    <a className="skip" href="#main" onClick={skip}>
      Skip to content
    </a>
  );
}

/** A page with something on top of its content sets where that begins. */
function skip(event: MouseEvent): void {
  event.preventDefault();
  const main = document.getElementById("main");
  const content = main?.querySelector<HTMLElement>("[data-content]") ?? main;
  content?.focus();
  content?.scrollIntoView({ block: "start" });
}

/** Puts the focus on the heading of a page that was opened; the first page keeps the browser's own order. */
function useFocusOnNavigation(): void {
  const { pathname } = useLocation();
  const previous = useRef(pathname);
  useEffect(() => {
    if (previous.current === pathname) return;
    previous.current = pathname;
    // Another part of the same page: its tab, which was pressed, keeps the focus.
    if (document.activeElement?.matches("main .tabs a")) return;
    const main = document.getElementById("main");
    const heading = main?.querySelector<HTMLElement>("h1");
    heading?.setAttribute("tabindex", "-1");
    (heading ?? main)?.focus({ preventScroll: true });
  }, [pathname]);
}
