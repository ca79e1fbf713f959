// Keeps the focus when its element is removed, such as a dismissed failure or a button of a past state: it moves to
// the nearest part of the page around it that is still there; left to the browser it would be nowhere.

const AROUND = "section, article, li, main";
/** The code that removes an element may set the focus itself a moment later. */
const MOMENT_MS = 50;

/** Watches over the focus of the whole page; answers how to stop. */
export function keepFocus(): () => void {
  let path: readonly Element[] = [];
  const holds = (event: FocusEvent) => {
    path = event.composedPath().filter((eventTarget) => eventTarget instanceof Element);
  };
  const leaves = () => {
    const [removed] = path;
    // A press beside it is on purpose. A removed element is gone a moment later.
    setTimeout(() => {
      if (path[0] === removed && removed?.isConnected === true && document.activeElement !== removed) path = [];
    });
  };
  const goOn = () => {
    if (document.activeElement !== null && document.activeElement !== document.body) return;
    const around = path.find((element) => element.isConnected && element.matches(AROUND)) ?? document.getElementById("main");
    path = [];
    if (!(around instanceof HTMLElement)) return;
    if (!around.hasAttribute("tabindex")) around.tabIndex = -1;
    around.focus({ preventScroll: true });
  };
  const observer = new MutationObserver(() => {
    if (path[0]?.isConnected === false) setTimeout(goOn, MOMENT_MS);
  });
  document.addEventListener("focusin", holds);
  document.addEventListener("focusout", leaves);
  observer.observe(document.body, { childList: true, subtree: true });
  return () => {
    document.removeEventListener("focusin", holds);
    document.removeEventListener("focusout", leaves);
    observer.disconnect();
  };
}
