// The filters of Changes, in the address and in the request; the text of an entry. Pure.
import type { components, operations } from "../api/schema";
import { addressOf, timeIn } from "./filters-address";

type AuditParams = NonNullable<operations["audit_list"]["parameters"]["query"]>;
export type Change = components["schemas"]["AuditEntry"];

export interface Filters {
  kind: string;
  actor: string;
  /** The id of an operation, a node or another thing. */
  subject: string;
  /** ISO times, "" if without limit. */
  from: string;
  to: string;
}

export const NO_FILTERS: Filters = { kind: "", actor: "", subject: "", from: "", to: "" };

/** The part of a kind before its dot. */
export const SORTS: readonly (readonly [sort: string, label: string])[] = [
  ["operation", "Operations"],
  ["node", "Nodes"],
  ["definition", "Definitions"],
  ["scheduling_rule", "Scheduling rules"],
  ["join_token", "Join tokens"],
  ["schedule", "Schedules"],
  ["user", "Passwords and keys"],
  ["admin", "Edits in the admin"],
];

/** The filters in the address; an invalid value is left out. */
export function filtersIn(query: URLSearchParams): Filters {
  const text = (name: string, longest: number) => (query.get(name) ?? "").trim().slice(0, longest);
  const kind = text("kind", 64);
  return {
    kind: SORTS.some(([sort]) => sort === kind) ? kind : "",
    actor: text("actor", 150),
    subject: text("subject", 64),
    from: timeIn(query, "from"),
    to: timeIn(query, "to"),
  };
}

/** The parameters of the request; 0 stands for the newest. */
export function requestParams(filters: Filters, cursor: number): AuditParams {
  const params: Record<string, string> = Object.fromEntries(addressOf(filters));
  return { ...params, ...(cursor === 0 ? {} : { cursor }) };
}

const OF_PARTS: Readonly<Record<string, string>> = { cancelled_part: "cancelled on one node", dismissed_part: "dismissed" };

/** "cancelled on one node" of `operation.cancelled_part`. */
export function words({ kind }: Pick<Change, "kind">): string {
  const did = kind.slice(kind.indexOf(".") + 1);
  return OF_PARTS[did] ?? did.replaceAll("_", " ");
}

/** The page of what was changed, "" where it has none. */
export function pageOf({ kind, subject_id }: Pick<Change, "kind" | "subject_id">): string {
  if (subject_id === "") return "";
  if (kind.startsWith("operation.")) return `/app/operations/${subject_id}`;
  return kind.startsWith("node.") && kind !== "node.deregistered" ? `/app/nodes/${subject_id}` : "";
}
