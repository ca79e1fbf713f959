// The frame of every page for a signed-in person: navigation, the bar on top, the operations strip, banners.
// It opens the feed and listens to the keys. Nothing is shown before it is known who is signed in.
import { Suspense, useState, type ReactNode } from "react";
import { Outlet, ScrollRestoration, useNavigate, useNavigation } from "react-router";
import { OperationsStrip } from "../operations/strip";
import { lazyDialog } from "../ui/lazy";
import { useShortcut } from "../ui/shortcuts";
import { Banners } from "./banners";
import { useCatchUp, useConnectionAnnouncements, useFeed, useStale } from "./feed";
import { SkipLink, useFrame } from "./frame";
import { Gate } from "./gate";
import { Sidebar } from "./nav";
import { PLACES, useLoadedAhead } from "./places";
import { useSignOut, type Person } from "./session";
import { SessionEnd } from "./session-end";
import { TopBar } from "./top-bar";
import "./shell.css";

const palette = () => import("./palette");
/** The search comes first: what is typed right after Ctrl-K must not be lost. */
const AHEAD = [palette, ...PLACES.map(({ load }) => load)];
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
  useFrame();
  useKeys(setOverlay);
  useLoadedAhead(AHEAD);
  const shared = { onShortcuts: () => setOverlay("shortcuts"), onSignOut: () => signOut.run() };
  return (
    <div className="app" data-stale={stale === null ? undefined : ""}>
      <SkipLink />
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

function useKeys(open: (overlay: "search" | "shortcuts") => void): void {
  const navigate = useNavigate();
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
