// The navigation: a sidebar, a rail of icons on a middling window, a drawer on a phone. It says at a glance how many
// nodes are well and whether anything runs or has failed.
import { Dialog } from "radix-ui";
import { useRef, useState, type MouseEvent, type ReactElement, type ReactNode } from "react";
import { NavLink, useLocation } from "react-router";
import { count } from "../lib/format";
import { PHONE, RAIL, useMedia } from "../lib/media";
import { useLive } from "../live/hooks";
import { isActive, needsAttention, type LiveState } from "../live/store";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";
import { Tip } from "../ui/tip";
import { loadAhead, PLACES, type Place } from "./places";

function healthy(state: LiveState): number {
  let total = 0;
  for (const node of state.nodes.values()) if (node.status === "healthy") total += 1;
  return total;
}

function tally(state: LiveState, matches: typeof isActive): number {
  let total = 0;
  for (const operation of state.operations.values()) if (matches(operation)) total += 1;
  return total;
}

function NodesSignal(): ReactNode {
  const well = useLive(healthy);
  const total = useLive((state) => state.nodes.size);
  const isLoaded = useLive((state) => state.nodesCursor !== null);
  if (!isLoaded) return null;
  return (
    <span className="signal">
      <span aria-hidden="true">
        {well}/{total}
      </span>
      <span className="visually-hidden">
        , {well} of {total} healthy
      </span>
    </span>
  );
}

function ActivitySignal(): ReactNode {
  const running = useLive((state) => tally(state, isActive));
  const failed = useLive((state) => tally(state, needsAttention));
  if (failed > 0) return <Badge className="signal badge bad" number={failed} words={`, ${count(failed, "failed operation")}`} />;
  if (running > 0) return <Badge className="signal badge" number={running} words={`, ${count(running, "operation")} running`} />;
  return null;
}

function errors(state: LiveState): number {
  return state.notices.filter((notice) => notice.level === "error").length;
}

function HealthSignal(): ReactNode {
  const failureCount = useLive(errors);
  return failureCount === 0 ? null : <Badge className="signal badge bad" number={failureCount} words={`, ${count(failureCount, "problem")}`} />;
}

function Badge({ className, number, words }: { className: string; number: number; words: string }): ReactNode {
  return (
    <span className={className}>
      <span aria-hidden="true">{number > 999 ? "999+" : number}</span>
      <span className="visually-hidden">{words}</span>
    </span>
  );
}

const SIGNALS: Readonly<Record<string, ReactNode>> = {
  "/app/nodes": <NodesSignal />,
  "/app/activity": <ActivitySignal />,
  "/app/health": <HealthSignal />,
};

/** Pages of the server's own. */
const OUTSIDE: readonly Omit<Place, "load">[] = [
  { to: "/admin/", label: "Admin", icon: "admin" },
  { to: "/api/docs", label: "API docs", icon: "docs" },
];

function Links({ rail }: { rail: boolean }): ReactNode {
  return (
    <>
      <ul className="nav-links">
        {PLACES.map(({ to, label, icon, load }) => (
          <li key={to} onPointerEnter={() => void loadAhead(load)} onFocus={() => void loadAhead(load)}>
            <RailTip rail={rail} text={label}>
              <NavLink to={to} className="nav-link">
                <Icon name={icon} />
                <span className="nav-label">{label}</span>
                {SIGNALS[to]}
              </NavLink>
            </RailTip>
          </li>
        ))}
      </ul>
      <ul className="nav-links nav-outside">
        {OUTSIDE.map(({ to, label, icon }) => (
          <li key={to}>
            <RailTip rail={rail} text={label}>
              <a href={to} className="nav-link">
                <Icon name={icon} />
                <span className="nav-label">{label}</span>
                <span className="signal nav-label">
                  <Icon name="external" size={12} />
                </span>
              </a>
            </RailTip>
          </li>
        ))}
      </ul>
      <Version />
    </>
  );
}

function Version(): ReactNode {
  const version = useLive((state) => state.version);
  return version === "" ? null : <p className="nav-version nav-label">Version {version}</p>;
}

function RailTip({ rail, text, children }: { rail: boolean; text: string; children: ReactElement }): ReactNode {
  return rail ? <Tip text={text}>{children}</Tip> : children;
}

export function Brand(): ReactNode {
  return (
    <span className="brand">
      <svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true" focusable="false">
        <rect className="brand-ground" width="22" height="22" rx="6" />
        <path className="brand-mark" d="M11 5.2 16 8v6l-5 2.8L6 14V8zM11 11l5-3M11 11v5.8M11 11 6 8" />
      </svg>
      <span className="nav-label">LocalAI Cluster</span>
    </span>
  );
}

/** The navigation of wide and middling windows. */
export function Sidebar(): ReactNode {
  const rail = useMedia(RAIL);
  const phone = useMedia(PHONE);
  if (phone) return null;
  return (
    <nav className={`sidebar ${rail ? "rail" : ""}`} aria-label="Main">
      <Brand />
      <Links rail={rail} />
    </nav>
  );
}

/** The navigation of phones: a button, and a drawer over the page. Give it the page's path as its key: it closes when
 * the page changes, from any cause. */
export function Drawer(): ReactNode {
  const phone = useMedia(PHONE);
  const { pathname } = useLocation();
  const [open, setOpen] = useState(false);
  const isLeaving = useRef(false);
  const press = (event: MouseEvent) => {
    const link = event.target instanceof Element ? event.target.closest("a") : null;
    if (link === null) return;
    isLeaving.current = link.getAttribute("href") !== pathname;
    setOpen(false);
  };
  if (!phone) return null;
  return (
    <Dialog.Root open={open} onOpenChange={setOpen}>
      <Dialog.Trigger asChild>
        <Button kind="ghost" className="icon" aria-label="Menu">
          <Icon name="menu" />
        </Button>
      </Dialog.Trigger>
      <Dialog.Portal>
        <Dialog.Overlay className="overlay" />
        <Dialog.Content
          className="drawer"
          aria-describedby={undefined}
          onCloseAutoFocus={(event) => {
            // The next page takes the focus; the button would take it away again.
            if (isLeaving.current) event.preventDefault();
          }}
        >
          <div className="row spread">
            <Dialog.Title className="drawer-title">
              <Brand />
            </Dialog.Title>
            <Dialog.Close asChild>
              <Button kind="ghost" className="icon" aria-label="Close menu">
                <Icon name="close" />
              </Button>
            </Dialog.Close>
          </div>
          <nav aria-label="Main" onClick={press}>
            <Links rail={false} />
          </nav>
        </Dialog.Content>
      </Dialog.Portal>
    </Dialog.Root>
  );
}
