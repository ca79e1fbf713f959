// What lies around every page: navigation, the operations strip, banners; starts the feed.
import { useContext, useEffect, type ReactNode } from "react";
import { NavLink, Outlet } from "react-router";
import { LiveContext } from "../live/hooks";
import { FeedSocket } from "../live/socket";

export function Shell(): ReactNode {
  const store = useContext(LiveContext);
  useEffect(() => {
    const socket = new FeedSocket(store);
    socket.start();
    return () => socket.stop();
  }, [store]);
  return (
    <div className="shell">
      <nav aria-label="Main">
        <NavLink to="/app/nodes">Nodes</NavLink>
        <NavLink to="/app/backends">Backends</NavLink>
        <NavLink to="/app/activity">Activity</NavLink>
      </nav>
      <main className="page">
        <Outlet />
      </main>
    </div>
  );
}
