// History: what has ended, from the server's record, the latest first. Filters are in the address; older entries come by
// pages. What ends meanwhile is asked for once the feed says so.
import { keepPreviousData, useInfiniteQuery, useQueryClient } from "@tanstack/react-query";
import { memo, useEffect, useId, useMemo, useState, type ReactNode } from "react";
import { useAction } from "../api/action";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useThrottledNodes } from "../backends/throttled-nodes";
import { useDebounced } from "../lib/debounced";
import { brief, compareNames, duration } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { PHONE, useMedia } from "../lib/media";
import { useChange, useLive } from "../live/hooks";
import { isActive, needsAttention, type LiveState } from "../live/store";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { DateField } from "../ui/date-field";
import { Confirm } from "../ui/dialog";
import { Empty, Loading } from "../ui/empty";
import { Icon } from "../ui/icons";
import { Problem } from "../ui/problem";
import { Ago } from "../ui/time";
import "./activity.css";
import { Choice, SEARCH_AFTER_MS, Words } from "./fields";
import { tookOf } from "./filter";
import { addressOf, isNarrowed } from "./filters-address";
import { HistoryDetails } from "./history-details";
import { NO_FILTERS, requestParams, exportOf, filtersIn, OUTCOMES, type Filters } from "./history-query";
import { WorkGlyph } from "./lines";
import { ActivityHead } from "./tabs";
import { KINDS, noun, outcome, outcomePlace, stateOf } from "./words";

type Entry = components["schemas"]["HistoryEntry"];

const KEY = ["operations", "history"] as const;
/** Many ends of one moment are one question. */
const GATHER_MS = 500;

export function HistoryPage(): ReactNode {
  const [filters, setFilters] = useInAddress(filtersIn, addressOf);
  const settled = useDebounced(filters, SEARCH_AFTER_MS);
  const record = useRecord(settled);
  const [clearing, setClearing] = useState(false);
  const entries = useMemo(() => record.data?.pages.flatMap((page) => page.operations) ?? [], [record.data]);
  const empty = record.data !== undefined && entries.length === 0;
  return (
    <div className="activity">
      <ActivityHead part="history" title="History" note="Finished operations. Failures appear here once they are dismissed.">
        {entries.length > 0 && <Exports filters={settled} />}
        {(entries.length > 0 || isNarrowed(filters)) && <Button onClick={() => setClearing(true)}>Clear history…</Button>}
      </ActivityHead>
      <FilterBar filters={filters} onChange={setFilters} />
      {record.isPending && <Loading subject="history" />}
      <Problem error={record.error} onRetry={() => void record.refetch()} />
      {record.newer && (
        <div>
          <Button onClick={record.refresh}>Show newer entries</Button>
        </div>
      )}
      {empty && isNarrowed(filters) && (
        <Empty title="No matching operations">
          <Button onClick={() => setFilters(NO_FILTERS)}>Show all</Button>
        </Empty>
      )}
      {empty && !isNarrowed(filters) && (
        <Empty title="No history">
          <p>Finished operations are kept here for the retention period.</p>
        </Empty>
      )}
      {entries.length > 0 && <Days entries={entries} />}
      {record.hasNextPage && (
        <div>
          <Button busy={record.isFetchingNextPage} onClick={() => void record.fetchNextPage()}>
            Older
          </Button>
        </div>
      )}
      {clearing && <ClearQuestion onClose={() => setClearing(false)} />}
    </div>
  );
}

/** Links, not buttons: the browser saves what the server sends, however long it is. */
function Exports({ filters }: { filters: Filters }): ReactNode {
  return (["csv", "ndjson"] as const).map((format) => (
    <a key={format} className="button" href={exportOf(filters, format)} download>
      {format === "csv" ? "Export CSV" : "Export JSON lines"}
    </a>
  ));
}

/** Grows with each operation that goes into the record. */
function lastEnd(state: LiveState): number {
  let last = 0;
  for (const operation of state.operations.values()) if (operation.seq > last && !isActive(operation) && !needsAttention(operation)) last = operation.seq;
  return last;
}

function useRecord(filters: Filters) {
  const queries = useQueryClient();
  const [newer, setNewer] = useState(false);
  const record = useInfiniteQuery({
    queryKey: [...KEY, filters],
    queryFn: ({ pageParam, signal }) => call(client.GET("/api/operations/history", { params: { query: requestParams(filters, pageParam) }, signal })),
    initialPageParam: "",
    getNextPageParam: (page) => page.nextCursor,
    placeholderData: keepPreviousData,
  });
  const last = useLive(lastEnd);
  useChange(last, () => setNewer(true));
  const pages = record.data?.pages.length ?? 0;
  const refresh = () => {
    setNewer(false);
    void queries.resetQueries({ queryKey: KEY });
  };
  // A reader of older pages stays there.
  const follow = newer && pages <= 1;
  useEffect(() => {
    if (!follow) return undefined;
    const timer = setTimeout(() => {
      setNewer(false);
      void queries.invalidateQueries({ queryKey: KEY });
    }, GATHER_MS);
    return () => clearTimeout(timer);
  }, [follow, last, queries]);
  return { ...record, newer: newer && !follow, refresh };
}

interface BarProps {
  filters: Filters;
  onChange: (filters: Filters) => void;
}

function FilterBar({ filters, onChange }: BarProps): ReactNode {
  const nodes = useThrottledNodes();
  const sorted = useMemo(() => [...nodes.values()].sort((left, right) => compareNames(left.name, right.name)), [nodes]);
  const change = (patch: Partial<Filters>) => onChange({ ...filters, ...patch });
  const options = sorted.map((node) => [node.id, node.name] as const);
  const removedNode = filters.node !== "" && !nodes.has(filters.node) ? [[filters.node, `removed node ${filters.node.slice(0, 8)}`] as const] : [];
  const form = (
    <form className="row wrap history-filters" role="search" aria-label="Filter history" onSubmit={(event) => event.preventDefault()}>
      <Choice label="Node" value={filters.node} options={[...removedNode, ...options]} onChange={(node) => change({ node })} />
      <Words label="Backend or model" value={filters.backend} onChange={(backend) => change({ backend })} />
      <Choice label="Kind" value={filters.kind} options={KINDS} onChange={(kind) => change({ kind })} />
      <Choice label="Outcome" value={filters.outcome} options={OUTCOMES.map((value) => [value, value] as const)} onChange={(value) => change({ outcome: OUTCOMES.find((option) => option === value) ?? "" })} />
      <Words label="Requested by" value={filters.actor} onChange={(actor) => change({ actor })} />
      <DateField label="Ended after" value={filters.from} onChange={(from) => change({ from })} />
      <DateField label="Ended before" value={filters.to} onChange={(to) => change({ to })} />
      {isNarrowed(filters) && (
        <Button small onClick={() => onChange(NO_FILTERS)}>
          Clear filters
        </Button>
      )}
    </form>
  );
  // A phone shows the entries first.
  const isPhone = useMedia(PHONE);
  if (!isPhone) return form;
  return (
    <details open={isNarrowed(filters) || undefined}>
      <summary>Filters</summary>
      {form}
    </details>
  );
}

function Days({ entries }: { entries: readonly Entry[] }): ReactNode {
  const days = useMemo(() => {
    const format = new Intl.DateTimeFormat(undefined, { dateStyle: "full" });
    const entriesByDay = new Map<string, Entry[]>();
    for (const entry of entries) {
      const day = format.format(new Date(entry.finishedAt ?? entry.createdAt));
      entriesByDay.set(day, [...(entriesByDay.get(day) ?? []), entry]);
    }
    return [...entriesByDay];
  }, [entries]);
  return days.map(([day, dayEntries]) => (
    <section key={day} className="stack" aria-label={day}>
      <h2>{day}</h2>
      <ul className="ended">
        {dayEntries.map((entry) => (
          <Line key={entry.jobID} entry={entry} />
        ))}
      </ul>
    </section>
  ));
}

const Line = memo(
  function Line({ entry }: { entry: Entry }): ReactNode {
    const [open, setOpen] = useState(false);
    const id = useId();
    const outcomeText = outcome(entry, duration(tookOf(entry)));
    return (
      <li className="history-line">
        <button type="button" className="history-toggle" aria-expanded={open} aria-controls={id} onClick={() => setOpen(!open)}>
          <WorkGlyph state={stateOf(entry)} />
          <span className="name ended-name">
            <strong>
              <bdi>{entry.name}</bdi>
            </strong>{" "}
            <span className="muted">{noun(entry)}</span>
          </span>
          <span className="name grow history-outcome">
            {outcomeText} <bdi>{outcomePlace(entry)}</bdi>
            {entry.status === "failed" && (
              <span className="muted">
                : <bdi>{brief(entry.error ?? "")}</bdi>
              </span>
            )}
          </span>
          <bdi className="name muted ended-actor">{entry.actor}</bdi>
          <span className="muted history-when">
            <Ago at={entry.finishedAt} />
          </span>
          <span className={`strip-caret ${open ? "open" : ""}`}>
            <Icon name="down" />
          </span>
        </button>
        <div id={id} hidden={!open}>
          {open && <HistoryDetails operation={entry} />}
        </div>
      </li>
    );
  },
  (left, right) => left.entry.jobID === right.entry.jobID && left.entry.seq === right.entry.seq,
);

function ClearQuestion({ onClose }: { onClose: () => void }): ReactNode {
  const queries = useQueryClient();
  const clearing = useAction(
    () => call(client.DELETE("/api/operations/history")),
    async () => {
      announce("History cleared");
      onClose();
      await queries.resetQueries({ queryKey: KEY });
    },
  );
  return (
    <Confirm open danger typed="clear" onClose={onClose} title="Clear history" action="Clear history" busy={clearing.busy} error={clearing.error} onConfirm={() => clearing.run()}>
      <ul className="effects">
        <li>Deletes the records of all finished operations for all users, including those that the filters hide.</li>
        <li>The records of who made a request, when and from where are deleted. This cannot be undone.</li>
        <li>Failures in the inbox stay.</li>
      </ul>
    </Confirm>
  );
}
