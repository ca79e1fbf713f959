// The entries of the search and their ranking: every word must be somewhere in an entry, and the nearer to the start of
// its title, the earlier it comes. Pure.
import type { components } from "../api/schema";
import { backendAddress } from "../backends/installed-model";
import { chatAddress } from "../chat/models";
import { modelAddress } from "../models/rows";
import { compareNames, count } from "../lib/format";
import { gpuWords } from "../live/gpus";
import type { LiveNode, Operation } from "../live/messages";
import { isActive, needsAttention } from "../live/store";
import { refusal } from "../nodes/shared/verbs";
import type { IconName } from "../ui/icons";
import { labelOf, pageOf, stateOf } from "../operations/words";

export const KINDS = ["Operations", "Nodes", "Models", "Backends", "Pages", "Actions"] as const;
export type Kind = (typeof KINDS)[number];

export interface Entry {
  key: string;
  kind: Kind;
  icon: IconName;
  title: string;
  detail: string;
  /** Found by these as well. */
  words?: string;
  /** A path of this page, or what to do. */
  to?: string;
  run?: () => void;
}

interface Prepared {
  entry: Entry;
  title: string;
  text: string;
}

export type Index = readonly Prepared[];

function plain(text: string): string {
  return text.normalize("NFKC").toLowerCase();
}

/** Entries in the form that is searched; made once for many searches. */
export function index(entries: readonly Entry[]): Index {
  return entries.map((entry) => {
    const title = plain(entry.title);
    return { entry, title, text: `${title} ${plain(entry.detail)} ${plain(entry.words ?? "")}` };
  });
}

const NOT_FOUND = 4;

function rank({ title, text }: Prepared, words: readonly string[], phrase: string): number {
  if (!words.every((word) => text.includes(word))) return NOT_FOUND;
  if (title === phrase) return 0;
  if (title.startsWith(phrase)) return 1;
  return title.includes(phrase) ? 2 : 3;
}

/** The best of each kind, at most `limit`; the kind with the best entry first. */
export function find(entries: Index, query: string, limit: number): Map<Kind, Entry[]> {
  const phrase = plain(query.trim());
  const words = phrase.split(/\s+/);
  const ranks: Prepared[][] = Array.from({ length: NOT_FOUND }, () => []);
  for (const prepared of entries) ranks[rank(prepared, words, phrase)]?.push(prepared);
  const groups = new Map<Kind, Entry[]>();
  for (const { entry } of ranks.flat()) {
    const group = groups.get(entry.kind) ?? [];
    if (group.length < limit) group.push(entry);
    groups.set(entry.kind, group);
  }
  return groups;
}

/** The entries before anything is typed: running and failed operations, and the pages. */
export function atFirst(entries: readonly Entry[], limit: number): Map<Kind, Entry[]> {
  const groups = new Map<Kind, Entry[]>();
  for (const kind of ["Operations", "Pages", "Actions"] as const) {
    const matches = entries.filter((entry) => entry.kind === kind).slice(0, limit);
    if (matches.length > 0) groups.set(kind, matches);
  }
  return groups;
}

export function nodeEntries(nodes: Iterable<LiveNode>): Entry[] {
  const entries = Array.from(nodes, (node): Entry => {
    const labels = Object.entries(node.labels).map(([key, value]) => `${key}=${value}`);
    const words = [node.id, node.http_address, node.gpu_vendor, gpuWords(node), ...labels].join(" ");
    const detail = [node.status, node.address].filter(Boolean).join(" · ");
    return { key: `node ${node.id}`, kind: "Nodes", icon: "nodes", title: node.name, detail, words, to: `/app/nodes/${node.id}` };
  });
  return byTitle(entries);
}

const VERBS = [
  ["approve", "Approve"],
  ["reject", "Reject"],
  ["drain", "Drain"],
  ["resume", "Resume"],
] as const;
/** "in" is more often the beginning of a name. */
const LEAST_OF_A_VERB = 3;

/**
 * What the query asks to do: "drain two", "install llama". A verb and the beginning of it are known; each entry leads to
 * the question that the page asks before anything happens.
 */
export function verbEntries(query: string, nodes: Iterable<LiveNode>, backends: readonly Entry[]): Entry[] {
  const [first = "", ...words] = plain(query.trim()).split(/\s+/);
  if (first.length < LEAST_OF_A_VERB) return [];
  const fits = (name: string) => words.every((word) => plain(name).includes(word));
  const actions: Entry[] = [];
  const meant = VERBS.filter(([verb]) => verb.startsWith(first));
  const installs = "install".startsWith(first);
  for (const node of meant.length > 0 || installs ? nodes : []) {
    if (!fits(node.name)) continue;
    for (const [verb, label] of meant) {
      if (refusal(verb, node) === "") actions.push(onNode(node, verb, `${label} ${node.name}…`));
    }
    if (installs && words.length > 0 && refusal("install", node) === "") actions.push(onNode(node, "install", `Install a backend on ${node.name}…`));
  }
  const offered = installs ? backends.filter(({ title }) => fits(title)) : [];
  const installEntries = offered.map(({ title, detail }): Entry => ({ key: `install ${title}`, kind: "Actions", icon: "backends", title: `Install ${title}…`, detail, to: `/app/backends?install=${encodeURIComponent(title)}` }));
  return [...byTitle(installEntries), ...byTitle(actions)];
}

const TALKS = ["chat", "talk"];
const BETWEEN = new Set(["to", "with"]);

/** The models to chat with: "talk to smollm2", "chat smol". */
export function chatEntries(query: string, models: readonly string[]): Entry[] {
  const [first = "", ...otherWords] = plain(query.trim()).split(/\s+/);
  if (first.length < LEAST_OF_A_VERB || !TALKS.some((verb) => verb.startsWith(first))) return [];
  const words = otherWords.filter((word) => !BETWEEN.has(word));
  const meant = models.filter((name) => words.every((word) => plain(name).includes(word)));
  return byTitle(meant.map((name): Entry => ({ key: `chat ${name}`, kind: "Actions", icon: "chat", title: `Chat with ${name}`, detail: "", to: chatAddress(name) })));
}

function onNode(node: LiveNode, verb: string, title: string): Entry {
  return { key: `${verb} ${node.id}`, kind: "Actions", icon: "nodes", title, detail: node.status, to: `/app/nodes/${node.id}?do=${verb}` };
}

/** The results with what is asked to do: on top once it is said to what, because a verb alone may be a name. */
export function withVerbs(query: string, verbs: readonly Entry[], groups: Map<Kind, Entry[]>, limit: number): Map<Kind, Entry[]> {
  if (verbs.length === 0) return groups;
  const actions: [Kind, Entry[]] = ["Actions", [...verbs.slice(0, limit), ...(groups.get("Actions") ?? [])]];
  const otherGroups = [...groups].filter(([kind]) => kind !== "Actions");
  return new Map<Kind, Entry[]>(/\S\s+\S/.test(query) ? [actions, ...otherGroups] : [...otherGroups, actions]);
}

/** Each model that a node has or that is defined, with its nodes. */
export function modelEntries(nodes: Iterable<LiveNode>, defined: readonly string[]): Entry[] {
  const places = gathered(nodes, (node) => node.models.map((model) => model.model_name));
  const names = new Set([...places.keys(), ...defined]);
  return byTitle(
    Array.from(names, (title): Entry => {
      const on = places.get(title);
      return { key: `model ${title}`, kind: "Models", icon: "model", title, detail: on === undefined ? "not running" : `on ${named(on)}`, to: modelAddress(title) };
    }),
  );
}

/** Each backend of the catalogue and each that is installed, once. */
export function backendEntries(
  nodes: Iterable<LiveNode>,
  catalogue: readonly components["schemas"]["CatalogueEntry"][],
): Entry[] {
  const places = gathered(nodes, (node) => node.backends);
  const offered = new Map(catalogue.map((entry) => [entry.name, entry]));
  const names = new Set([...places.keys(), ...offered.keys()]);
  return byTitle(
    Array.from(names, (title): Entry => {
      const on = places.get(title) ?? [];
      const words = offered.get(title)?.tags.join(" ") ?? "";
      const detail = on.length === 0 ? "in the catalogue" : `on ${named(on)}`;
      const to = backendAddress(title);
      return { key: `backend ${title}`, kind: "Backends", icon: "backends", title, detail, words, to };
    }),
  );
}

/** Failed ones first, then those under way, then what ended, each from the newest: news of one moves no line. */
export function operationEntries(operations: Iterable<Operation>): Entry[] {
  const weight = (operation: Operation) => (needsAttention(operation) ? 0 : isActive(operation) ? 1 : 2);
  const sorted = [...operations].sort((left, right) => weight(left) - weight(right) || Date.parse(right.createdAt) - Date.parse(left.createdAt) || right.seq - left.seq);
  return sorted.map((operation) => ({
    key: `operation ${operation.jobID}`,
    kind: "Operations",
    icon: "activity",
    title: operation.name,
    detail: [labelOf(operation.kind), stateOf(operation), operation.nodeName ?? ""].filter(Boolean).join(" · "),
    words: `${operation.kind} ${operation.status} ${operation.jobID} ${operation.actor} ${operation.message} ${operation.error ?? ""}`,
    to: pageOf(operation),
  }));
}

function gathered(nodes: Iterable<LiveNode>, pick: (node: LiveNode) => readonly string[]): Map<string, LiveNode[]> {
  const places = new Map<string, LiveNode[]>();
  for (const node of nodes) {
    for (const name of new Set(pick(node))) places.set(name, [...(places.get(name) ?? []), node]);
  }
  return places;
}

function named(nodes: readonly LiveNode[]): string {
  const [first, second] = nodes;
  if (nodes.length > 2) return count(nodes.length, "node");
  return [first, second].flatMap((node) => node?.name ?? []).join(", ");
}

function byTitle(entries: Entry[]): Entry[] {
  return entries.sort((left, right) => compareNames(left.title, right.title));
}
