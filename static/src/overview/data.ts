// What the overview reads: the cluster at a glance and its figures over time. Both are read again with the feed's signs
// of life, at most once in their own interval.
import { keepPreviousData, queryOptions, useQuery, useQueryClient, type QueryClient, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useChange, useLive } from "../live/hooks";

export type Overview = components["schemas"]["Overview"];
export type Figures = components["schemas"]["Figures"];

const OVERVIEW_MS = 15_000;
const LEAST_STEP_S = 10;
const HOUR_S = 3600;
/** How far back figures are kept. */
const YEAR_S = 365 * 24 * HOUR_S;
const OVERVIEW = queryOptions({ queryKey: ["overview"], queryFn: ({ signal }) => call(client.GET("/api/overview", { signal })) });

function useRefreshed<Data>(query: UseQueryResult<Data>, everyMs: number): UseQueryResult<Data> {
  const beats = useLive((state) => state.beats);
  useChange(beats, () => {
    if (!query.isFetching && Date.now() - Math.max(query.dataUpdatedAt, query.errorUpdatedAt) >= everyMs) void query.refetch();
  });
  return query;
}

export function useOverview(): UseQueryResult<Overview> {
  return useRefreshed(useQuery(OVERVIEW), OVERVIEW_MS);
}

/** Seconds since 1970 by the server's clock; by the browser's as long as the overview has not been read. */
export function serverSeconds(queries: QueryClient): number {
  const state = queries.getQueryState(OVERVIEW.queryKey);
  const ahead = state?.data === undefined ? 0 : Date.parse(state.data.at) - state.dataUpdatedAt;
  return (Date.now() + ahead) / 1000;
}

/** A time that a person looks at: the last seconds up to now, or from one second to another. */
export type Range = { last: number } | { from: number; to: number };

/** The range between these seconds; one that reaches now keeps its length and follows the time. */
export function zoomRange(from: number, to: number, now: number): Range {
  return to >= now ? { last: Math.min(to - from, YEAR_S) } : { from: Math.max(from, now - YEAR_S), to };
}

export function useFigures(scope: "cluster" | "node" | "model", name: string, range: Range): UseQueryResult<Figures> {
  const queries = useQueryClient();
  const query = useQuery({
    queryKey: ["figures", scope, name, range],
    queryFn: async ({ signal }) => {
      const times = await timesOf(range, queries);
      return call(client.GET("/api/figures", { params: { query: { scope, ...(name === "" ? {} : { name }), ...times } }, signal }));
    },
    placeholderData: keepPreviousData,
  });
  return useRefreshed(query, "last" in range ? 1000 * Math.max(query.data?.step ?? 0, LEAST_STEP_S) : Infinity);
}

/** The parameters of a range; the last hour is what the server shows without any. */
async function timesOf(range: Range, queries: QueryClient): Promise<{ from?: string; to?: string }> {
  if (!("last" in range)) return { from: iso(range.from), to: iso(range.to) };
  if (range.last === HOUR_S) return {};
  await queries.query({ ...OVERVIEW, staleTime: "static" });
  return { from: iso(serverSeconds(queries) - range.last) };
}

function iso(seconds: number): string {
  return new Date(1000 * seconds).toISOString();
}
