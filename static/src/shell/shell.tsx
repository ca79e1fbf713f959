// The frame of every page for a signed-in person: navigation, the bar on top, the operations strip, banners.
// It opens the feed and listens to the keys. Nothing is shown before it is known who is signed in.
import { Suspense, useEffect, useRef, useState, type MouseEvent, type ReactNode } from "react";
import { Outlet, ScrollRestoration, useLocation, useNavigate, useNavigation } from "react-router";
import { OperationsStrip } from "../operations/strip";
import { keepFocus } from "../ui/keep-focus";
import { lazyDialog } from "../ui/lazy";
import { listen, useShortcut } from "../ui/shortcuts";
import { Banners } from "./banners";
import { useCatchUp, useConnectionAnnouncements, useFeed, useStale } from "./feed";
import { Gate } from "./gate";
import { Sidebar } from "./nav";
import { useSignOut, type Person } from "./session";
import { SessionEnd } from "./session-end";
import { TopBar } from "./top-bar";
import "./shell.css";

const SEARCH_AFTER_MS = 1500;
const palette = () => import("./palette");
const Palette = lazyDialog(async () => (await palette()).Palette);
const ShortcutsDialog = lazyDialog(async () => (await import("./shortcuts-dialog")).ShortcutsDialog);

export function Shell(): ReactNode {
  return <Gate>{(user) => <Frame user={user} />}</Gate>;
}

function Frame({ user }: { user: Person }): ReactNode {
  const [overlay, setOverlay] = useState<"" | "search" | "shortcuts">("");
  const restart = useFeed();
  const stale = useStale();
  const signOut = useSignOut();
  const { state } = useNavigation();
  useConnectionAnnouncements(stale);
  useCatchUp();
  useFocusOnNavigation();
  useKeys(setOverlay);
  useSearchReady();
  const shared = { onShortcuts: () => setOverlay("shortcuts"), onSignOut: () => signOut.run() };
  return (
    <div className="app" data-stale={stale === null ? undefined : ""}>
      <a className="skip" href="#main" onClick={skip}>
        Skip to content
      </a>
      <Sidebar />
      <div className="app-body">
        <TopBar user={user.name} stale={stale} onSearch={() => setOverlay("search")} onRetry={restart} {...shared} />
        {state === "loading" && <div className="progress-line" aria-hidden="true" />}
        <SessionEnd user={user} onBack={restart} />
        <Banners failure={signOut.error} onRetry={restart} />
        <main id="main" className="page" tabIndex={-1}>
          <Outlet />
        </main>
        <OperationsStrip />
      </div>
      <Suspense>
        {overlay === "search" && <Palette onClose={() => setOverlay("")} {...shared} />}
        {overlay === "shortcuts" && <ShortcutsDialog onClose={() => setOverlay("")} />}
      </Suspense>
      <ScrollRestoration />
    </div>
  );
}

/** Fetches the search once the page has had its say: what is typed right after Ctrl-K must not be lost. */
function useSearchReady(): void {
  useEffect(() => {
    const timer = setTimeout(() => void palette().catch(() => undefined), SEARCH_AFTER_MS);
    return () => clearTimeout(timer);
  }, []);
}

/** A page with something on top of its content sets where that begins. */
function skip(event: MouseEvent): void {
  event.preventDefault();
  const main = document.getElementById("main");
  const content = main?.querySelector<HTMLElement>("[data-content]") ?? main;
  content?.focus();
  content?.scrollIntoView({ block: "start" });
}

function useKeys(open: (overlay: "search" | "shortcuts") => void): void {
  const navigate = useNavigate();
  useEffect(listen, []);
  useEffect(keepFocus, []);
  useShortcut("mod+k", () => open("search"), "Search");
  useShortcut("/", () => open("search"), "Search");
  useShortcut("?", () => open("shortcuts"), "Show keyboard shortcuts");
  useShortcut("g o", () => void navigate("/app/overview"), "Go to Overview");
  useShortcut("g n", () => void navigate("/app/nodes"), "Go to Nodes");
  useShortcut("g c", () => void navigate("/app/capacity"), "Go to Capacity");
  useShortcut("g m", () => void navigate("/app/models"), "Go to Models");
  useShortcut("g t", () => void navigate("/app/chat"), "Go to Chat");
  useShortcut("g s", () => void navigate("/app/scheduling"), "Go to Scheduling");
  useShortcut("g b", () => void navigate("/app/backends"), "Go to Backends");
  useShortcut("g a", () => void navigate("/app/activity"), "Go to Activity");
  useShortcut("g h", () => void navigate("/app/health"), "Go to System health");
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
