// What the overview reads: the cluster at a glance and its figures over time. Both are read again with the feed's signs
// of life, at most once in their own interval.
import { keepPreviousData, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useChange, useLive } from "../live/hooks";

export type Overview = components["schemas"]["Overview"];
export type Figures = components["schemas"]["Figures"];

const OVERVIEW_MS = 15_000;
const LEAST_STEP_S = 10;

function useRefreshed<Data>(query: UseQueryResult<Data>, everyMs: number): UseQueryResult<Data> {
  const beats = useLive((state) => state.beats);
  useChange(beats, () => {
    if (!query.isFetching && Date.now() - query.dataUpdatedAt >= everyMs) void query.refetch();
  });
  return query;
}

export function useOverview(): UseQueryResult<Overview> {
  const query = useQuery({ queryKey: ["overview"], queryFn: ({ signal }) => call(client.GET("/api/overview", { signal })) });
  return useRefreshed(query, OVERVIEW_MS);
}

/** A time that a person looks at: the last seconds up to now, or from one second to another. */
export type Range = { last: number } | { from: number; to: number };

export function useFigures(scope: "cluster" | "node" | "model", name: string, range: Range): UseQueryResult<Figures> {
  const query = useQuery({
    queryKey: ["figures", scope, name, range],
    queryFn: ({ signal }) => {
      const [from, to] = "last" in range ? [Date.now() / 1000 - range.last, undefined] : [range.from, range.to];
      const times = { from: iso(from), ...(to === undefined ? {} : { to: iso(to) }) };
      return call(client.GET("/api/figures", { params: { query: { scope, ...(name === "" ? {} : { name }), ...times } }, signal }));
    },
    placeholderData: keepPreviousData,
  });
  return useRefreshed(query, "last" in range ? 1000 * Math.max(query.data?.step ?? 0, LEAST_STEP_S) : Infinity);
}

function iso(seconds: number): string {
  return new Date(1000 * seconds).toISOString();
}
