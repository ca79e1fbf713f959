// The pages of the navigation. Their code is loaded ahead, while the browser has nothing else to do or when a link
// gets the pointer or the focus, so that opening one waits for nothing but its data.
import { useEffect, type ComponentType } from "react";
import { useLive } from "../live/hooks";
import type { IconName } from "../ui/icons";

export interface Place {
  to: string;
  label: string;
  icon: IconName;
  load: () => Promise<ComponentType>;
}

export const PLACES: readonly Place[] = [
  { to: "/app/overview", label: "Overview", icon: "overview", load: async () => (await import("../overview/page")).OverviewPage },
  { to: "/app/nodes", label: "Nodes", icon: "nodes", load: async () => (await import("../nodes/list/page")).NodesPage },
  { to: "/app/capacity", label: "Capacity", icon: "capacity", load: async () => (await import("../capacity/page")).CapacityPage },
  { to: "/app/models", label: "Models", icon: "model", load: async () => (await import("../models/page")).ModelsPage },
  { to: "/app/chat", label: "Chat", icon: "chat", load: async () => (await import("../chat/page")).ChatPage },
  { to: "/app/scheduling", label: "Scheduling", icon: "scheduling", load: async () => (await import("../scheduling/page")).SchedulingPage },
  { to: "/app/backends", label: "Backends", icon: "backends", load: async () => (await import("../backends/page")).BackendsPage },
  { to: "/app/activity", label: "Activity", icon: "activity", load: async () => (await import("../operations/activity")).ActivityPage },
  { to: "/app/health", label: "System health", icon: "health", load: async () => (await import("../system/page")).HealthPage },
];

/** The longest wait for a moment without work, in ms: on a busy page there may be none. */
const IDLE_MS = 2000;

/** Calls `work` when the browser is idle; returns how to prevent that. */
function whenIdle(work: () => void): () => void {
  // Safari has no idle callbacks.
  if (!("requestIdleCallback" in window)) {
    const timer = setTimeout(work, IDLE_MS);
    return () => clearTimeout(timer);
  }
  const handle = requestIdleCallback(work, { timeout: IDLE_MS });
  return () => cancelIdleCallback(handle);
}

interface Connection {
  saveData?: boolean;
  effectiveType?: string;
}

/** True if each byte costs the person money or time. */
function isCostly(): boolean {
  const { connection } = navigator as { connection?: Connection };
  return connection?.saveData === true || (connection?.effectiveType ?? "4g") !== "4g";
}

/** Loads code ahead. A failure says nothing: opening the page tries again. */
export async function loadAhead(load: () => Promise<unknown>): Promise<void> {
  if (!isCostly()) await load().catch(() => undefined);
}

/** Loads these ahead, one after the other, once the feed has sent what the open page waits for. The array must stay
 * the same one. */
export function useLoadedAhead(loads: readonly (() => Promise<unknown>)[]): void {
  const isLoaded = useLive((state) => state.nodesCursor !== null);
  useEffect(() => {
    if (!isLoaded) return;
    const rest = [...loads];
    let cancel = () => {};
    const next = () => {
      const load = rest.shift();
      if (load !== undefined) cancel = whenIdle(() => void loadAhead(load).then(next));
    };
    next();
    return () => {
      rest.length = 0;
      cancel();
    };
  }, [loads, isLoaded]);
}
