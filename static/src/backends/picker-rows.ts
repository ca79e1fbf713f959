// The rows of the picker: which nodes it lists, and what each says now. Brings together the feed, what was sent from
// here, and what the server says of jobs that the feed no longer names.
import { useQueries } from "@tanstack/react-query";
import { useEffect, useMemo } from "react";
import { compareNames } from "../lib/format";
import { ApiError, call, client } from "../api/client";
import type { components } from "../api/schema";
import { useLive, useNow } from "../live/hooks";
import type { LiveNode, Operation } from "../live/messages";
import { useWork } from "../operations/watch";
import { canInstall, eligibility, progressOf, underWayFor, type Eligibility, type Progress, type Sent } from "./picker-model";
import type { NodesById } from "./throttled-nodes";
import { isTheirs, runs, useRun, type Run } from "./runs";

type Job = components["schemas"]["Job"];

export interface Row {
  node: LiveNode;
  expected: Eligibility;
  /** The progress; null without a request. */
  progress: Progress | null;
  /** True if the running work was requested from this dialog. */
  mine: boolean;
  /** The operation behind it, for its link; undefined if it is not known. */
  operation: Operation | undefined;
  /** True if it can be chosen. */
  open: boolean;
}

/** Milliseconds without news from the feed after which the server is polled for an accepted job. */
const OVERDUE_MS = 3_000;
const AGAIN_MS = 5_000;

/** Every node, with what would happen or happens on it, by name. */
export function useRows(backend: string, nodes: NodesById): Row[] {
  const { operations } = useWork();
  const run = useRun(backend);
  const underWay = useMemo(() => underWayFor(backend, operations.values()), [backend, operations]);
  const recordedJobs = useRecordedJobs(run, operations);
  useEffect(() => {
    const installs = [...underWay].filter(([, operation]) => operation.kind === "backend_install");
    runs.adopt(backend, installs.map(([nodeID, operation]) => [nodeID, operation.jobID] as const));
  }, [backend, underWay]);
  return useMemo(() => {
    const ordered = [...nodes.values()].sort((left, right) => compareNames(left.name, right.name));
    return ordered.map((node) => rowOf(node, backend, run.get(node.id), underWay.get(node.id), operations, recordedJobs));
  }, [nodes, backend, run, underWay, operations, recordedJobs]);
}

function rowOf(
  node: LiveNode,
  backend: string,
  sent: Sent | undefined,
  underWay: Operation | undefined,
  operations: ReadonlyMap<string, Operation>,
  recordedJobs: ReadonlyMap<string, Job | Error>,
): Row {
  const expected = eligibility(node, backend, underWay);
  const jobID = sent?.step === "accepted" ? sent.jobID : "";
  const operation = operations.get(jobID) ?? underWay;
  let progress = sent === undefined ? null : progressOf(sent, operation, recordedJobs.get(jobID), node.id);
  // It came there in another way meanwhile.
  if (progress?.ended === "badly" && expected.kind === "there") progress = null;
  return { node, expected, progress, mine: progress !== null && !isTheirs(sent), operation, open: progress === null && canInstall(expected) };
}

interface Listing {
  /** Chosen outside: always listed. */
  requested: ReadonlySet<string>;
  selected: ReadonlySet<string>;
  /** Draining ones too. */
  draining: boolean;
}

/**
 * Agents and pending nodes only if they were chosen outside, with the reason; draining ones when asked for or selected. What was asked for comes first;
 * what somebody else installs stays in its place: no row moves under the pointer.
 */
export function listedRows(rows: readonly Row[], { requested, selected, draining }: Listing): Row[] {
  const first = (row: Row) => requested.has(row.node.id) || row.mine;
  const listed = rows.filter(
    (row) =>
      first(row) ||
      (row.node.node_type === "backend" &&
        row.node.status !== "pending" &&
        (draining || selected.has(row.node.id) || row.node.status !== "draining")),
  );
  return [...listed.filter(first), ...listed.filter((row) => !first(row))];
}

/** An ended or unknown job is read once; a running one comes with the feed, or is polled. */
function isLast(job: Job | Error | null): boolean {
  return job instanceof Error ? job instanceof ApiError && job.status === 404 : job?.processed === true;
}

/** Asks for the jobs that the feed does not name, though it is live: they ended while it was cut. */
function useRecordedJobs(run: Run, operations: ReadonlyMap<string, Operation>): ReadonlyMap<string, Job | Error> {
  const live = useLive((state) => state.connection === "live");
  const skew = useLive((state) => state.skew);
  const now = useNow(1000) - skew;
  const missing = new Set<string>();
  for (const sent of run.values()) {
    if (live && sent.step === "accepted" && !operations.has(sent.jobID) && now - sent.at > OVERDUE_MS) missing.add(sent.jobID);
  }
  const uids = [...missing];
  return useQueries({
    queries: uids.map((uid) => ({
      queryKey: ["backends", "job", uid],
      queryFn: () => call(client.GET("/api/backends/job/{uid}", { params: { path: { uid } } })),
      staleTime: Infinity,
      refetchInterval: ({ state }: { state: { data: Job | undefined; error: Error | null } }) => (isLast(state.data ?? state.error) ? false : AGAIN_MS),
    })),
    combine: (results) =>
      new Map(
        results.flatMap((result, index) => {
          const job: Job | Error | null = result.data ?? result.error;
          const uid = uids[index];
          return uid === undefined || job === null ? [] : [[uid, job] as const];
        }),
      ),
  });
}
