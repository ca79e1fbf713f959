// What the overview reads: the cluster at a glance and its figures over time. Both are read again with the feed's signs
// of life, at most once in their own interval.
import { keepPreviousData, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useLive } from "../live/hooks";
import { useRefreshed } from "../live/refreshed";

export type Overview = components["schemas"]["Overview"];
export type Figures = components["schemas"]["Figures"];

const OVERVIEW_MS = 15_000;
const MINUTE_MS = 60_000;
const LEAST_STEP_S = 10;
const HOUR_S = 3600;
/** How far back figures are kept. */
const YEAR_S = 365 * 24 * HOUR_S;

export function useOverview(): UseQueryResult<Overview> {
  const query = useQuery({ queryKey: ["overview"], queryFn: ({ signal }) => call(client.GET("/api/overview", { signal })) });
  return useRefreshed(query, OVERVIEW_MS);
}

/** Seconds since 1970 by the server's clock; `skew` is the feed's. */
export function serverSeconds(skew: number): number {
  return (Date.now() + skew) / 1000;
}

/** A time that a person looks at: the last seconds up to now, or from one second to another. */
export type Range = { last: number } | { from: number; to: number };

/** The range between these seconds; one that reaches now keeps its length and follows the time. */
export function zoomRange(from: number, to: number, now: number): Range {
  return to >= now ? { last: Math.min(to - from, YEAR_S) } : { from: Math.max(from, now - YEAR_S), to };
}

export function useFigures(scope: "cluster" | "node" | "model", name: string, range: Range): UseQueryResult<Figures> {
  const skew = useLive((state) => state.skew);
  const query = useQuery({
    // A browser whose clock is wrong reads again when the feed has told how wrong.
    queryKey: ["figures", scope, name, range, needsClock(range) ? Math.round(skew / MINUTE_MS) : 0],
    queryFn: ({ signal }) =>
      call(client.GET("/api/figures", { params: { query: { scope, ...(name === "" ? {} : { name }), ...timesOf(range, skew) } }, signal })),
    placeholderData: keepPreviousData,
  });
  return useRefreshed(query, "last" in range ? 1000 * Math.max(query.data?.step ?? 0, LEAST_STEP_S) : Infinity);
}

/** True if its beginning depends on the time; the last hour is what the server shows without any. */
function needsClock(range: Range): range is { last: number } {
  return "last" in range && range.last !== HOUR_S;
}

/** The parameters of a range. */
function timesOf(range: Range, skew: number): { from?: string; to?: string } {
  if (needsClock(range)) return { from: iso(serverSeconds(skew) - range.last) };
  return "last" in range ? {} : { from: iso(range.from), to: iso(range.to) };
}

function iso(seconds: number): string {
  return new Date(1000 * seconds).toISOString();
}
