// A node's status, with doubt: one that is healthy by the last word of the server, but whose heartbeats are late, may be
// dead already. The server says "offline" only when its time limit is over.
import type { ReactNode } from "react";
import { span } from "../../lib/format";
import { useLive } from "../../live/hooks";
import type { LiveNode, NodeStatus as Status } from "../../live/messages";
import { StatusPill } from "../../ui/status";
import { useClock } from "./clock";

/** Two heartbeats of the default interval, and the time that one takes to arrive here. */
const LATE_MS = 25_000;
/** One heartbeat, for a node whose worker does not answer on the bus either. */
const LATE_AND_MUTE_MS = 12_000;
const MUTE = "the worker is not responding";

export type ShownStatus = Status | "rejected";

/** The status as the pages show it: a rejected node is pending to the server, but nobody has to decide about it any more. */
export function shownStatus({ status, rejected }: Pick<LiveNode, "status" | "rejected">): ShownStatus {
  return status === "pending" && rejected !== null ? "rejected" : status;
}

type HeartbeatFields = Pick<LiveNode, "status" | "last_heartbeat" | "inventory_error">;

/** For how many seconds a healthy node has been silent; 0 if its heartbeats are in time. */
export function silentFor({ status, last_heartbeat: at, inventory_error: error }: HeartbeatFields, now: number): number {
  if (status !== "healthy" || at === null) return 0;
  const silent = now - Date.parse(at);
  return silent > (error === MUTE ? LATE_AND_MUTE_MS : LATE_MS) ? Math.floor(silent / 1000) : 0;
}

export function NodeStatus({ node }: { node: LiveNode }): ReactNode {
  const live = useLive((state) => state.connection === "live");
  const silent = useClock((now) => silentFor(node, now));
  // Without the feed no node can be heard: the banner shows it.
  if (silent === 0 || !live) return <StatusPill status={shownStatus(node)} />;
  return (
    <span className="pill warn" title="Its last status was healthy, but its heartbeats are late. It may be down.">
      silent for {span(silent)}
    </span>
  );
}
