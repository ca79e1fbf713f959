// The galleries' catalogue: read once, searched and counted here. The nodes on which it is installed come with the feed.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import { count } from "../lib/format";
import { matchesWords, wordsOf } from "../lib/words";
import type { components } from "../api/schema";
import type { LiveNode } from "../live/messages";

export type Catalogue = components["schemas"]["Catalogue"];
export type Entry = components["schemas"]["CatalogueEntry"];

export function useCatalogue(): UseQueryResult<Catalogue> {
  return useQuery({
    queryKey: ["backends", "catalogue"],
    queryFn: () => call(client.GET("/api/backends", { params: { query: { page: 1, items: 9999, sort: "name", order: "asc" } } })),
  });
}

/** A search from the address, and the address of a search. */
export function termIn(query: URLSearchParams): string {
  return query.get("q") ?? "";
}

export function addressOf(term: string): URLSearchParams {
  return new URLSearchParams(term === "" ? {} : { q: term });
}

/** The search of the catalogue: words, and a tag. */
export interface Search {
  term: string;
  tag: string;
}

export function searchIn(query: URLSearchParams): Search {
  return { term: termIn(query), tag: query.get("tag") ?? "" };
}

export function addressOfSearch({ term, tag }: Search): URLSearchParams {
  const address = addressOf(term);
  if (tag !== "") address.set("tag", tag);
  return address;
}

/** The shown entries: builds that another entry chooses, and development ones, only on request. */
export interface CatalogueFilter {
  term: string;
  builds: boolean;
  development: boolean;
  tag?: string;
  /** Only entries that a healthy node can run. */
  runnable?: boolean;
}

export function search(entries: readonly Entry[], filter: CatalogueFilter): Entry[] {
  const words = wordsOf(filter.term);
  return entries
    .filter((entry) => (filter.builds || !entry.isAlias) && (filter.development || !entry.isDevelopment))
    .filter((entry) => !filter.tag || entry.tags.includes(filter.tag))
    .filter((entry) => !filter.runnable || entry.variants.length > 0)
    .filter((entry) => matchesWords(filter.term, [entry.name, entry.description, entry.gallery, ...entry.tags].join(" ")))
    .sort((left, right) => rank(right, words) - rank(left, words));
}

/** Names before descriptions, what begins so before what contains it; otherwise the order stays. */
function rank(entry: Entry, words: readonly string[]): number {
  const name = entry.name.toLowerCase();
  return 2 * words.filter((word) => name.includes(word)).length + Number(words[0] !== undefined && name.startsWith(words[0]));
}

/** The build that nodes of one capability install for an entry. */
export interface Runs {
  capability: string;
  nodes: number;
  build: string;
  reason: string;
}

/** The kinds of healthy nodes that can run an entry, and how many of the healthy nodes there are in all. */
export function runsOn(entry: Pick<Entry, "variants">, nodes: Catalogue["nodesByCapability"]): { kinds: Runs[]; able: number; total: number } {
  const kinds = entry.variants.map((variant) => ({ ...variant, nodes: nodes[variant.capability] ?? 0 }));
  const sum = (counts: readonly number[]): number => counts.reduce((total, value) => total + value, 0);
  return { kinds, able: sum(kinds.map((kind) => kind.nodes)), total: sum(Object.values(nodes)) };
}

/** "all 3 nodes", "1 of 3 nodes"; "" without a healthy node. */
export function runsOnText({ able, total }: { able: number; total: number }): string {
  if (total === 0) return "";
  if (able === 0) return "no compatible nodes";
  return able === total ? (total === 1 ? "your node" : `all ${total} nodes`) : `${able} of ${count(total, "node")}`;
}

/** On how many nodes each backend is installed, by its name in lower case. */
export function installedOn(nodes: Iterable<LiveNode>): Map<string, number> {
  const counts = new Map<string, number>();
  for (const node of nodes) {
    for (const name of new Set(node.backends.map((backend) => backend.toLowerCase()))) counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return counts;
}

/** A description's first line, without the marks of its Markdown. */
export function summary(description: string): string {
  const line = description.split("\n").find((line) => line.trim() !== "") ?? "";
  return line.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/[*_`#>]+/g, "").trim();
}
