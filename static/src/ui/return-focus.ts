// Dialogs that are opened by a state and not by a button of their own give the focus back to where it came from: to
// the element that had it, to the button of the menu whose item it was, or to the page if that is gone.
import { useCallback, useRef } from "react";

/** Elements that had the focus, newest last: a dialog's own field may have taken it before the dialog is asked. */
const recent: HTMLElement[] = [];
const REMEMBERED = 8;

document.addEventListener("focusin", ({ target }) => {
  if (!(target instanceof HTMLElement)) return;
  recent.push(target);
  if (recent.length > REMEMBERED) recent.shift();
});

interface ReturnFocus {
  ref: (content: HTMLElement | null) => void;
  onCloseAutoFocus: (event: Event) => void;
}

/** Ref and handler for the content of a Radix dialog. `keep` false: the focus goes elsewhere by itself. */
export function useReturnFocus(keep: () => boolean = () => true): ReturnFocus {
  const opener = useRef<HTMLElement | null>(null);
  const ref = useCallback((content: HTMLElement | null) => {
    if (content === null) return;
    const present = document.activeElement;
    const previous = content.contains(present) ? recent.findLast((element) => !content.contains(element)) : present;
    opener.current = origin(previous ?? null);
  }, []);
  return {
    ref,
    onCloseAutoFocus: (event) => {
      event.preventDefault();
      // A dialog that was opened meanwhile would take the focus back and select what was typed into it.
      const isTaken = document.activeElement !== null && document.activeElement !== document.body;
      if (isTaken || !keep()) return;
      const element = opener.current?.isConnected === true ? opener.current : document.getElementById("main");
      element?.focus({ preventScroll: true });
    },
  };
}

/** An item goes with its menu; the menu's button stays. */
function origin(element: Element | null): HTMLElement | null {
  const menu = element?.closest("[role='menu']");
  const button = menu?.getAttribute("aria-labelledby");
  const opener = button === null || button === undefined ? element : document.getElementById(button);
  return opener instanceof HTMLElement && opener !== document.body ? opener : null;
}
