// The feed of this tab: open while somebody is signed in who may have it, opened again on demand.
import { useQueryClient } from "@tanstack/react-query";
import { useCallback, useContext, useEffect, useMemo, useState } from "react";
import { ApiError } from "../api/client";
import { LiveContext, useChange, useLive } from "../live/hooks";
import { FeedSocket } from "../live/socket";
import type { LiveState } from "../live/store";
import { announce } from "../ui/announce";

/** Keeps the feed open; returns how to reopen it at once. */
export function useFeed(): () => void {
  const store = useContext(LiveContext);
  const socket = useMemo(() => new FeedSocket(store), [store]);
  useEffect(() => {
    socket.start();
    return () => socket.stop();
  }, [socket]);
  return useCallback(() => {
    socket.stop();
    socket.start();
  }, [socket]);
}

/** A moment without the feed is no news. */
const PATIENCE_MS = 3000;

export interface Staleness {
  /** When the feed was lost, ms of this browser. */
  since: number;
  seconds: number;
}

/** Since when what is shown may be old; null while it is not. */
export function useStale(): Staleness | null {
  const since = useLive((state) => state.staleSince);
  const [now, setNow] = useState(() => Date.now());
  useEffect(() => {
    if (since === null) return;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [since]);
  if (since === null || now - since < PATIENCE_MS) return null;
  return { since, seconds: Math.floor((now - since) / 1000) };
}

/** True if the server reads the database: if not, what is shown is old, however live the feed. */
function isReadable(state: LiveState): boolean {
  return state.notices.every((notice) => notice.id !== "database-unreachable");
}

/** True if the feed's state is current. */
export function useReadable(): boolean {
  return useLive(isReadable);
}

/** Asks again for what failed while the server or its database was away; no one has to press for it. */
export function useCatchUp(): void {
  const queries = useQueryClient();
  const well = useLive((state) => state.connection === "live" && isReadable(state));
  const away = ({ state: { error } }: { state: { error: Error | null } }) => error instanceof ApiError && (error.status === 0 || error.status >= 500);
  useChange(well, (previous) => {
    if (!previous) void queries.invalidateQueries({ predicate: away });
  });
}

/** The local time of day with seconds. */
export function clockTime(ms: number): string {
  return new Date(ms).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** Says once that the connection is lost, and once that it is back. */
export function useConnectionAnnouncements(stale: Staleness | null): void {
  useChange(stale !== null, (previous) => {
    if (previous) announce("Connection restored. The page is up to date.");
    else announce("Connection lost. The page may be out of date.");
  });
}
