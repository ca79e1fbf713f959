// Changes: what people did, when and from where, the newest first. Filters are in the address; older entries come by pages.
// Actions of workers, controllers and schedules are not listed.
import { keepPreviousData, useInfiniteQuery } from "@tanstack/react-query";
import { useMemo, type ReactNode } from "react";
import { Link } from "react-router";
import { call, client } from "../api/client";
import { useDebounced } from "../lib/debounced";
import { useInAddress } from "../lib/in-address";
import { Button } from "../ui/button";
import { DateField } from "../ui/date-field";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { Ago } from "../ui/time";
import "./activity.css";
import { NO_FILTERS, requestParams, filtersIn, pageOf, SORTS, words, type Change, type Filters } from "./changes-query";
import { Choice, SEARCH_AFTER_MS, Words } from "./fields";
import { addressOf, isNarrowed } from "./filters-address";
import { From } from "./lines";
import { ActivityHead } from "./tabs";

export function ChangesPage(): ReactNode {
  const [filters, setFilters] = useInAddress(filtersIn, addressOf);
  const audit = useAudit(useDebounced(filters, SEARCH_AFTER_MS));
  const entries = useMemo(() => audit.data?.pages.flatMap((page) => page.entries) ?? [], [audit.data]);
  const empty = audit.data !== undefined && entries.length === 0;
  return (
    <div className="activity">
      <ActivityHead part="changes" title="Audit log" note="Changes by people, kept for the retention period.">
        <Button busy={audit.isRefetching} onClick={() => void audit.refetch()}>
          Refresh
        </Button>
      </ActivityHead>
      <FilterBar filters={filters} onChange={setFilters} />
      {audit.isPending && <Loading subject="changes" />}
      <Problem error={audit.error} onRetry={() => void audit.refetch()} />
      {empty && (
        <Empty title={isNarrowed(filters) ? "No matching changes" : "No changes"}>
          {isNarrowed(filters) ? <Button onClick={() => setFilters(NO_FILTERS)}>Show all</Button> : <p>Changes by people appear here.</p>}
        </Empty>
      )}
      {entries.length > 0 && (
        <ul className="ended" aria-label="Changes by people">
          {entries.map((entry) => (
            <Line key={entry.id} entry={entry} />
          ))}
        </ul>
      )}
      {audit.hasNextPage && (
        <div>
          <Button busy={audit.isFetchingNextPage} onClick={() => void audit.fetchNextPage()}>
            Older
          </Button>
        </div>
      )}
    </div>
  );
}

function useAudit(filters: Filters) {
  return useInfiniteQuery({
    queryKey: ["audit", "all", filters],
    queryFn: ({ pageParam, signal }) => call(client.GET("/api/audit", { params: { query: requestParams(filters, pageParam) }, signal })),
    initialPageParam: 0,
    getNextPageParam: (page) => page.nextCursor,
    placeholderData: keepPreviousData,
  });
}

function FilterBar({ filters, onChange }: { filters: Filters; onChange: (filters: Filters) => void }): ReactNode {
  const change = (patch: Partial<Filters>) => onChange({ ...filters, ...patch });
  return (
    <form className="row wrap history-filters" role="search" aria-label="Filter changes" onSubmit={(event) => event.preventDefault()}>
      <Choice label="Action" value={filters.kind} options={SORTS} onChange={(kind) => change({ kind })} />
      <Words label="By" value={filters.actor} onChange={(actor) => change({ actor })} />
      <Words label="Object ID" placeholder="exact ID" value={filters.subject} onChange={(subject) => change({ subject })} />
      <DateField label="After" value={filters.from} onChange={(from) => change({ from })} />
      <DateField label="Before" value={filters.to} onChange={(to) => change({ to })} />
      {isNarrowed(filters) && (
        <Button small onClick={() => onChange(NO_FILTERS)}>
          Clear filters
        </Button>
      )}
    </form>
  );
}

function Line({ entry }: { entry: Change }): ReactNode {
  const page = pageOf(entry);
  return (
    <li className="ended-line">
      <span className="name ended-name">{page === "" ? <bdi>{entry.subject}</bdi> : <Link to={page}><bdi>{entry.subject}</bdi></Link>}</span>
      <span className="name grow">
        {words(entry)}
        {entry.detail !== "" && (
          <span className="muted">
            : <bdi>{entry.detail}</bdi>
          </span>
        )}
      </span>
      <span className="name muted">
        <bdi>{entry.actor}</bdi> <From entry={entry} />
      </span>
      <span className="muted">
        <Ago at={entry.at} />
      </span>
    </li>
  );
}
