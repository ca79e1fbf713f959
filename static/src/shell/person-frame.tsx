// The frame for a person who is not an administrator: the chat, the models that may be used, and the own API keys.
import type { ReactNode } from "react";
import { Navigate, NavLink, Outlet, useLocation } from "react-router";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";
import { SkipLink, useFrame } from "./frame";
import { Brand } from "./nav";
import { Problem } from "../ui/problem";
import { useSignOut, type Person } from "./session";
import { SessionEnd } from "./session-end";
import { ThemeMenu } from "./top-bar";
import "./shell.css";

const PLACES = [
  { to: "/app/chat", label: "Chat", icon: "chat" },
  { to: "/app/keys", label: "API keys", icon: "key" },
] as const;
const PASSWORD = "/app/password";

export function PersonFrame({ user }: { user: Person }): ReactNode {
  const { pathname } = useLocation();
  const signOut = useSignOut();
  useFrame();
  if (pathname !== PASSWORD && !PLACES.some(({ to }) => to === pathname)) return <Navigate to="/app/chat" replace />;
  return (
    <div className="app-body">
      <SkipLink />
      <header className="top-bar person-bar">
        <Brand />
        <nav className="row" aria-label="Main">
          {PLACES.map(({ to, label, icon }) => (
            <NavLink key={to} to={to} className="nav-link">
              <Icon name={icon} />
              <span>{label}</span>
            </NavLink>
          ))}
        </nav>
        <span className="grow" />
        <ThemeMenu />
        <NavLink to={PASSWORD} className="button ghost icon" aria-label={`Change password of ${user.name}`}>
          <Icon name="user" />
        </NavLink>
        <Button kind="ghost" className="icon" aria-label="Sign out" busy={signOut.busy} onClick={() => signOut.run()}>
          <Icon name="leave" />
        </Button>
      </header>
      <SessionEnd user={user} />
      <Problem error={signOut.error} />
      <main id="main" className="page" tabIndex={-1}>
        <Outlet />
      </main>
    </div>
  );
}
