// One operation: what the server's record says of it, and what the feed has told since. The record knows what has long
// ended, and what waiting work waits for; the feed knows every change at once.
import { keepPreviousData, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { ApiError, call, client } from "../api/client";
import { exact } from "../lib/format";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { isActive } from "../live/store";
import type { Change } from "./changes-query";

type Wait = Pick<Operation, "waitsFor" | "waitsSince">;

/** A place in a queue moves with other work, which the feed does not report for this operation. */
const REFRESH_MS = 3_000;
const PLAIN = "waits for a controller";

/** The operation as far as it is loaded; `unknown` once the server has no record of it. */
export interface LoadedOperation {
  operation: Operation | undefined;
  unknown: boolean;
  query: UseQueryResult<Operation>;
}

export function useOperation(id: string): LoadedOperation {
  const live = useLive((state) => state.operations.get(id));
  const query = useQuery({
    queryKey: ["operations", "one", id, live?.status ?? ""],
    queryFn: ({ signal }) => call(client.GET("/api/operations/{job_id}", { params: { path: { job_id: id } }, signal })),
    placeholderData: keepPreviousData,
    refetchInterval: ({ state }) => (waits(state.data) ? REFRESH_MS : false),
  });
  const unknown = live === undefined && query.error instanceof ApiError && query.error.status === 404;
  return { operation: merged(query.data, live), unknown, query };
}

/** True if one of its targets is queued. */
function waits(operation: Operation | undefined): boolean {
  return operation !== undefined && isActive(operation) && (operation.isQueued || (operation.nodes ?? []).some((target) => target.status === "queued"));
}

/** The newer of the two, with the record's reason for waiting if there is no better one. */
export function merged(record: Operation | undefined, live: Operation | undefined): Operation | undefined {
  const newest = live === undefined || (record !== undefined && record.seq > live.seq) ? record : live;
  if (newest === undefined || record === undefined || !isActive(newest)) return newest;
  const recordedTargets = new Map((record.nodes ?? []).map((target) => [target.node_id, target]));
  const nodes = newest.nodes?.map((target) => {
    const queueText = target.status === "queued" && (target.attempts ?? 0) === 0 ? inWords(recordedTargets.get(target.node_id)) : "";
    return queueText === "" ? target : { ...target, reason: queueText };
  });
  const queueText = newest.isQueued && newest.attempts === 0 ? inWords(record) : "";
  return { ...newest, ...(nodes === undefined ? {} : { nodes }), ...(queueText === "" ? {} : { message: queueText }) };
}

/** "waits for node gpu-2, which is offline since 10:31"; "" if the page has a text of its own. */
function inWords(wait: Wait | undefined): string {
  const { waitsFor = "", waitsSince } = wait ?? {};
  if (waitsFor === PLAIN) return "";
  return waitsSince === undefined ? waitsFor : `${waitsFor} since ${exact(waitsSince)}`;
}

/** People's actions on the operation, the latest first; read again when there may be new ones. */
export function useChanges(operation: Operation): UseQueryResult<readonly Change[]> {
  const { jobID: id, status, dismissedAt, waves, nodes = [] } = operation;
  // Not with every change: work under way reports several times a second.
  const cancelled = nodes.filter((target) => target.status === "cancelled").length;
  return useQuery({
    queryKey: ["audit", id, status, dismissedAt, waves?.state, waves?.open, waves?.lastReplicas, cancelled],
    queryFn: async ({ signal }) => (await call(client.GET("/api/audit", { params: { query: { subject: id } }, signal }))).entries,
    placeholderData: keepPreviousData,
  });
}
