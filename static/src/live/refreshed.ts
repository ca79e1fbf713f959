// Reads that no message of the feed announces: they are repeated with its signs of life.
import type { UseQueryResult } from "@tanstack/react-query";
import { useChange, useLive } from "./hooks";

/** Reads again at most once in `everyMs`, also after a failure. */
export function useRefreshed<Data>(query: UseQueryResult<Data>, everyMs: number): UseQueryResult<Data> {
  useChange(useLive((state) => state.beats), () => {
    const readAt = Math.max(query.dataUpdatedAt, query.errorUpdatedAt);
    if (!query.isFetching && Date.now() - readAt >= everyMs) void query.refetch();
  });
  return query;
}
