// The queries of this page beside the live row: the node's facts, its backends and its timeline. Each
// is a query of its own, so that one may fail alone, and is fetched again when the live row has moved.
import {
  useMutation,
  useQuery,
  useQueryClient,
  type UseQueryResult,
} from "@tanstack/react-query";
import { useCallback, useContext } from "react";
import { useAction, type Action } from "../../api/action";
import { call, client } from "../../api/client";
import type { components } from "../../api/schema";
import type { LiveNode } from "../../live/messages";
import { LiveContext, useChange } from "../../live/hooks";
import { withNewest, withOlder, type Timeline } from "./events";

type Schemas = components["schemas"];
export type NodeDetail = Schemas["NodeDetail"];
export type NodeBackend = Schemas["NodeBackend"];
export type Conflict = Schemas["Conflict"];
export type NodeEvent = Schemas["Event"];
export type EventKind = Schemas["EventKindEnum"];

/** Time limit of a query: no section loads without an end. */
const PATIENCE_MS = 10_000;

const keys = {
  node: (id: string) => ["nodes", id] as const,
  detail: (id: string) => ["nodes", id, "detail"] as const,
  backends: (id: string) => ["nodes", id, "backends"] as const,
  conflicts: (id: string) => ["nodes", id, "conflicts"] as const,
  timeline: (id: string) => ["nodes", id, "events"] as const,
  events: (id: string, kind: EventKind | "") => ["nodes", id, "events", kind] as const,
};

function patient(signal: AbortSignal): AbortSignal {
  return AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MS)]);
}

/** The node's facts, overrides and sources of labels; 404 if there is no such node. */
export function useDetail(id: string): UseQueryResult<NodeDetail> {
  return useQuery({
    queryKey: keys.detail(id),
    queryFn: ({ signal }) => call(client.GET("/api/nodes/{node_id}", { params: { path: { node_id: id } }, signal: patient(signal) })),
  });
}

/** Fetches what is shown of the node again; of one that is gone, what has happened to it. */
export function useRefresh(id: string): () => void {
  const queries = useQueryClient();
  const store = useContext(LiveContext);
  return useCallback(() => {
    const { node, timeline } = keys;
    void queries.invalidateQueries({ queryKey: store.read().nodes.has(id) ? node(id) : timeline(id) });
  }, [queries, store, id]);
}

/** Keeps the queries in step with the live row: every change but heartbeats, lists and claims moves `revision`. */
export function useInStep(id: string, live: LiveNode | undefined): void {
  const refresh = useRefresh(id);
  useChange(`${live?.revision ?? ""} ${live?.inventory_at ?? ""} ${live?.open_conflicts ?? ""}`, refresh);
}

/** The open identity conflicts of this node. */
export function useConflicts(id: string): UseQueryResult<readonly Conflict[]> {
  return useQuery({
    queryKey: keys.conflicts(id),
    queryFn: async ({ signal }) => {
      const params = { path: { node_id: id } };
      const claims = await call(client.GET("/api/nodes/{node_id}/conflicts", { params, signal: patient(signal) }));
      return claims.filter((claim) => claim.state === "open");
    },
  });
}

/**
 * Does something to the node and fetches what is shown of it again, unless `done` answers false: the node is no more.
 * `done` runs also if the part that asked is gone.
 */
export function useNodeAction<Input, Output>(id: string, work: (input: Input) => Promise<Output>, done: (output: Output, input: Input) => unknown = () => undefined): Action<Input> {
  const refresh = useRefresh(id);
  return useAction(work, (output, input) => {
    if (done(output, input) !== false) refresh();
  });
}

/** The backends of the node. */
export function useBackends(id: string): UseQueryResult<readonly NodeBackend[]> {
  return useQuery({
    queryKey: keys.backends(id),
    queryFn: ({ signal }) => {
      const params = { path: { node_id: id } };
      return call(client.GET("/api/nodes/{node_id}/backends", { params, signal: patient(signal) }));
    },
  });
}

async function eventsPage(id: string, kind: EventKind | "", cursor: number | undefined, signal?: AbortSignal) {
  const query = { ...(kind === "" ? {} : { kind }), ...(cursor === undefined ? {} : { cursor }) };
  const params = { path: { node_id: id }, query };
  const until = patient(signal ?? new AbortController().signal);
  return call(client.GET("/api/nodes/{node_id}/events", { params, signal: until }));
}

/** The timeline, newest first, and a function that loads older events. */
export function useTimeline(id: string, kind: EventKind | "") {
  const queries = useQueryClient();
  const queryKey = keys.events(id, kind);
  const newest = useQuery({
    queryKey,
    queryFn: async ({ signal }): Promise<Timeline> => {
      const page = await eventsPage(id, kind, undefined, signal);
      return withNewest(queries.getQueryData<Timeline>(queryKey), page);
    },
  });
  const older = useMutation({
    // Another kind is another question: what was asked for the one before goes there.
    mutationKey: queryKey,
    mutationFn: (cursor: number) => eventsPage(id, kind, cursor),
    networkMode: "always",
    onSuccess: (page) => queries.setQueryData<Timeline>(queryKey, (shown) => withOlder(shown, page)),
  });
  return { newest, older };
}
