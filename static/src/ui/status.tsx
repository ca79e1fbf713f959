// The state of a node, a replica or an operation's target, or what came of a decision, as a word with a colour; the
// word is never left out.
import type { ReactNode } from "react";

type Tone = "good" | "warn" | "bad" | "info" | "";

const TONES: Readonly<Record<string, Tone>> = {
  healthy: "good",
  unhealthy: "bad",
  offline: "bad",
  draining: "info",
  pending: "warn",
  rejected: "",
  loaded: "good",
  staging: "info",
  loading: "info",
  unloading: "warn",
  idle: "",
  queued: "",
  downloading: "info",
  running_on_worker: "warn",
  success: "good",
  error: "bad",
  processing: "info",
  waiting_for_nodes: "warn",
  completed: "good",
  failed: "bad",
  cancelled: "",
  superseded: "",
  waiting: "warn",
  retrying: "warn",
  running: "info",
  overdue: "warn",
  placed: "good",
  refused: "bad",
};

const WORDS: Readonly<Record<string, string>> = {
  running_on_worker: "running on the worker",
  overdue: "running on the worker",
  waiting_for_nodes: "waiting for nodes",
  success: "done",
  error: "failed",
  processing: "running",
};

export function StatusPill({ status }: { status: string }): ReactNode {
  return <span className={`pill ${TONES[status] ?? ""}`}>{WORDS[status] ?? status}</span>;
}
