// The filters of History, in the address and in the request. Pure.
import type { operations } from "../api/schema";
import { addressOf, timeIn } from "./filters-address";
import { KINDS } from "./words";

type HistoryParams = NonNullable<operations["operations_history"]["parameters"]["query"]>;
type Exported = NonNullable<operations["operations_history_export"]["parameters"]["query"]>;
export type Outcome = NonNullable<HistoryParams["outcome"]>;

export interface Filters {
  node: string;
  backend: string;
  kind: string;
  outcome: Outcome | "";
  actor: string;
  /** ISO times, "" if without limit. */
  from: string;
  to: string;
}

export const NO_FILTERS: Filters = { node: "", backend: "", kind: "", outcome: "", actor: "", from: "", to: "" };

export const OUTCOMES: readonly Outcome[] = ["completed", "failed", "cancelled"];

const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;

/** The filters in the address; an invalid value is left out. */
export function filtersIn(query: URLSearchParams): Filters {
  const text = (name: string) => (query.get(name) ?? "").trim().slice(0, 255);
  const node = text("node");
  const outcome = text("outcome");
  return {
    node: UUID.test(node) ? node : "",
    backend: text("backend"),
    kind: KINDS.some(([kind]) => kind === text("kind")) ? text("kind") : "",
    outcome: OUTCOMES.find((option) => option === outcome) ?? "",
    actor: text("actor"),
    from: timeIn(query, "from"),
    to: timeIn(query, "to"),
  };
}

export function requestParams(filters: Filters, cursor: string): HistoryParams {
  const params: Record<string, string> = Object.fromEntries(addressOf(filters));
  return { ...params, ...(cursor === "" ? {} : { cursor }) };
}

/** The address of the export. */
export function exportOf(filters: Filters, format: NonNullable<Exported["format"]>): string {
  return `/api/operations/history/export?${new URLSearchParams([["format", format], ...addressOf(filters)])}`;
}

interface Span {
  from: number;
  to: number;
}

/** When a part waited and when it ran, as shares (0 to 1) of the time from the request to the end of all. */
export function spans(target: { startedAt?: string; finishedAt?: string }, begin: number, end: number): { waited: Span; ran: Span } {
  const length = Math.max(end - begin, 1);
  const share = (iso: string | undefined, otherwise: number) => {
    const at = Date.parse(iso ?? "");
    return Number.isNaN(at) ? otherwise : Math.min(Math.max((at - begin) / length, 0), 1);
  };
  const to = share(target.finishedAt, 1);
  const from = Math.min(share(target.startedAt, to), to);
  return { waited: { from: 0, to: from }, ran: { from, to } };
}
