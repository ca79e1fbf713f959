// The bar on top of every page: search, how the connection is, the theme, and who is signed in.
import type { ReactNode } from "react";
import { useLocation, useNavigate } from "react-router";
import { useLive } from "../live/hooks";
import type { Connection } from "../live/store";
import { Button } from "../ui/button";
import { Icon, type IconName } from "../ui/icons";
import { Menu, type MenuItem } from "../ui/menu";
import { choose, useTheme, type Theme } from "../ui/theme";
import { Tip } from "../ui/tip";
import { Notices } from "./banners";
import { clockTime, useReadable, type Staleness } from "./feed";
import { Drawer } from "./nav";

interface TopBarProps {
  user: string;
  stale: Staleness | null;
  onSearch: () => void;
  onShortcuts: () => void;
  onRetry: () => void;
  onSignOut: () => void;
}

export function TopBar({ user, stale, onSearch, onShortcuts, onRetry, onSignOut }: TopBarProps): ReactNode {
  const { pathname } = useLocation();
  return (
    <header className="top-bar">
      <Drawer key={pathname} />
      <Button className="search-button" aria-keyshortcuts="Control+K" onClick={onSearch}>
        <Icon name="search" />
        <span className="search-words">Search nodes, models, operations</span>
        <kbd aria-hidden="true">{isMac() ? "⌘K" : "Ctrl-K"}</kbd>
      </Button>
      <span className="grow" />
      <Notices />
      <ConnectionMark stale={stale} onRetry={onRetry} />
      <ThemeMenu />
      <UserMenu user={user} onShortcuts={onShortcuts} onSignOut={onSignOut} />
    </header>
  );
}

function isMac(): boolean {
  return navigator.userAgent.includes("Mac OS");
}

function ConnectionMark({ stale, onRetry }: { stale: Staleness | null; onRetry: () => void }): ReactNode {
  const connection = useLive((state) => state.connection);
  const readable = useReadable();
  const refused = connection === "forbidden" ? "Refused" : connection === "signed-out" ? "Signed out" : "";
  if (refused !== "") {
    return (
      <span className="connection bad" data-testid="connection">
        {refused}
      </span>
    );
  }
  if (stale !== null && connection !== "live") {
    return (
      <span className="connection warn" data-testid="connection">
        <span>
          Stale<span className="since"> since {clockTime(stale.since)}</span>, {stale.seconds}s
        </span>
        <Button small kind="ghost" className="icon" aria-label="Reconnect now" onClick={onRetry}>
          <Icon name="retry" size={14} />
        </Button>
      </span>
    );
  }
  const live = connection === "live" && readable;
  return (
    <Tip text={words(connection, readable)}>
      <span className={`connection ${live ? "good" : "warn"}`} data-testid="connection" tabIndex={0}>
        {connection === "live" ? (live ? "Live" : "Not up to date") : connection === "connecting" ? "Connecting" : "Reconnecting"}
      </span>
    </Tip>
  );
}

function words(connection: Connection, readable: boolean): string {
  if (connection !== "live") return "Connecting to the server.";
  return readable ? "The page updates live." : "The server cannot read its database. The page may be out of date.";
}

const THEMES: readonly { theme: Theme; label: string; icon: IconName }[] = [
  { theme: "system", label: "System", icon: "system" },
  { theme: "light", label: "Light", icon: "light" },
  { theme: "dark", label: "Dark", icon: "dark" },
];

export function ThemeMenu(): ReactNode {
  const theme = useTheme();
  const items = THEMES.map<MenuItem>((choice) => ({
    label: choice.label,
    icon: choice.icon,
    checked: choice.theme === theme,
    onSelect: () => choose(choice.theme),
  }));
  const icon = THEMES.find((choice) => choice.theme === theme)?.icon ?? "system";
  const trigger = (
    <Button kind="ghost" className="icon" aria-label="Theme">
      <Icon name={icon} />
    </Button>
  );
  return <Menu name="Theme" items={items} trigger={trigger} />;
}

function UserMenu({ user, onShortcuts, onSignOut }: Pick<TopBarProps, "user" | "onShortcuts" | "onSignOut">): ReactNode {
  const navigate = useNavigate();
  const items: MenuItem[] = [
    { label: "Change password", icon: "key", onSelect: () => void navigate("/app/password") },
    { label: "API keys", icon: "key", onSelect: () => void navigate("/app/keys") },
    { label: "Keyboard shortcuts", icon: "keyboard", onSelect: onShortcuts },
    { label: "Sign out", icon: "leave", onSelect: onSignOut },
  ];
  const trigger = (
    <Button kind="ghost" className="icon" aria-label="Account">
      <Icon name="user" />
    </Button>
  );
  const heading = (
    <>
      Signed in as <bdi>{user}</bdi>
    </>
  );
  return <Menu name="Account" items={items} trigger={trigger} heading={heading} />;
}
