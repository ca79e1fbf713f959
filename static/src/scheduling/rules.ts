// Scheduling rules: what the server says of them, what a person types, and how the two become each other. Pure but
// for the calls at the end. The selector is a JSON text in an answer and an object in a request.
import { keepPreviousData, useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import { compareNames } from "../lib/format";
import { ApiError, call, client } from "../api/client";
import type { components } from "../api/schema";
import { useChange, useLive } from "../live/hooks";
import type { LiveNode } from "../live/messages";

export type Rule = components["schemas"]["SchedulingRule"];
type RuleRequest = components["schemas"]["SchedulingRuleRequest"];
export type Selector = Readonly<Record<string, string>>;

/** The rule's selector; null for one that cannot be read, which matches nothing. */
export function selectorOf(rule: Pick<Rule, "node_selector">): Selector | null {
  if (rule.node_selector === undefined) return {};
  try {
    const read: unknown = JSON.parse(rule.node_selector);
    const isObject = typeof read === "object" && read !== null && !Array.isArray(read);
    return isObject && Object.values(read).every((value) => typeof value === "string") ? (read as Selector) : null;
  } catch {
    return null;
  }
}

/** The nodes that may run models: an approved worker that is no agent. */
export function candidates(nodes: Iterable<LiveNode>): LiveNode[] {
  return [...nodes].filter((node) => node.node_type === "backend" && node.status !== "pending").sort((left, right) => compareNames(left.name, right.name));
}

/** The nodes that have every label of the selector. */
export function matching(nodes: readonly LiveNode[], selector: Selector): LiveNode[] {
  const labels = Object.entries(selector);
  return nodes.filter((node) => labels.every(([key, value]) => Object.hasOwn(node.labels, key) && node.labels[key] === value));
}

const NAMED = 10;

/** "matches 3 of 5 nodes: a, b, c" */
export function matchWords(matchedNodes: readonly LiveNode[], total: number): string {
  const names = matchedNodes.slice(0, NAMED).map((node) => node.name).join(", ");
  const othersText = matchedNodes.length > NAMED ? ` and ${matchedNodes.length - NAMED} more` : "";
  return `Matches ${matchedNodes.length} of ${total} ${total === 1 ? "node" : "nodes"}${names === "" ? "" : `: ${names}${othersText}`}`;
}

/** The keys that nodes have, and the values of one of them; for suggestions. */
export function labelKeys(nodes: readonly LiveNode[]): string[] {
  return [...new Set(nodes.flatMap((node) => Object.keys(node.labels)))].sort();
}

export function labelValues(nodes: readonly LiveNode[], key: string): string[] {
  return [...new Set(nodes.flatMap((node) => (Object.hasOwn(node.labels, key) ? [node.labels[key] ?? ""] : [])))].sort();
}

/** True if the rule sets a number of replicas; another one only restricts and routes. */
export function counts(rule: Pick<Rule, "min_replicas" | "max_replicas" | "spread_all">): boolean {
  return rule.spread_all === true || rule.min_replicas > 0 || rule.max_replicas > 0;
}

/** The number of replicas that the rule requires: "1 to 3", "at least 2", "up to 4", "one on every matching node". */
export function demand(rule: Pick<Rule, "min_replicas" | "max_replicas" | "spread_all">): string {
  const { min_replicas: least, max_replicas: most } = rule;
  if (rule.spread_all === true) return "one on every matching node";
  if (least > 0 && most > 0) return least === most ? `exactly ${least}` : `${least} to ${most}`;
  if (least > 0) return `at least ${least}`;
  return most > 0 ? `up to ${most}` : "any number, on request";
}

export interface Standing {
  tone: "good" | "warn" | "info" | "";
  word: string;
}

/** The state of the rule in a word; `now` in ms by the server's clock. */
export function ruleState(rule: Rule, now: number): Standing {
  if (!counts(rule)) return { tone: "", word: "restricts nodes only" };
  if (cooldown(rule, now) > 0) return { tone: "warn", word: "cooling down" };
  const { state } = rule;
  if (state === undefined) return { tone: "", word: "not checked yet" };
  if (state.current >= state.wanted) return { tone: "good", word: "satisfied" };
  if (state.loading > 0) return { tone: "info", word: "loading" };
  return { tone: "warn", word: "too few replicas" };
}

/** Seconds for which nothing is tried for the model; 0 if it is. */
export function cooldown(rule: Rule, now: number): number {
  const secondsLeft = rule.unsatisfiable_until === undefined ? 0 : (Date.parse(rule.unsatisfiable_until) - now) / 1000;
  return secondsLeft > 0 ? secondsLeft : 0;
}

/** The form's values, as text until they are sent. */
export interface Draft {
  model: string;
  selector: Selector;
  /** A label that is typed and not added yet: it counts, because it is seen. */
  key: string;
  value: string;
  spread: boolean;
  min: string;
  max: string;
  policy: "" | NonNullable<Rule["route_policy"]>;
  prefix: string;
  absolute: string;
  relative: string;
}

export const BLANK: Draft = {
  model: "", selector: {}, key: "", value: "", spread: false, min: "1", max: "", policy: "", prefix: "", absolute: "", relative: "",
};

export function draftOf(rule: Rule): Draft {
  const text = (value: number | undefined) => (value === undefined || value === 0 ? "" : String(value));
  return {
    ...BLANK,
    model: rule.model_name,
    selector: selectorOf(rule) ?? {},
    spread: rule.spread_all === true,
    min: text(rule.min_replicas),
    max: text(rule.max_replicas),
    policy: rule.route_policy ?? "",
    prefix: text(rule.min_prefix_match),
    absolute: text(rule.balance_abs_threshold),
    relative: text(rule.balance_rel_threshold),
  };
}

/** The labels of the draft's selector, with the one that is being typed. */
export function selectorIn(draft: Draft): Selector {
  const key = draft.key.trim();
  return key === "" ? draft.selector : { ...draft.selector, [key]: draft.value };
}

/** The fields of the dialog by the names that the server has for them. */
export type Field = "model_name" | "node_selector" | "spread_all" | "min_replicas" | "max_replicas" | "route_policy" | "min_prefix_match" | "balance_abs_threshold" | "balance_rel_threshold";
export type FieldProblems = Partial<Record<Field, string>>;

const NUMBERS = [
  ["min_replicas", "min", true],
  ["max_replicas", "max", true],
  ["min_prefix_match", "prefix", false],
  ["balance_abs_threshold", "absolute", true],
  ["balance_rel_threshold", "relative", false],
] as const;

const number = (text: string) => Number(text.trim());

/** Problems that the browser can detect, by field; the server checks the rest. */
export function validateDraft(draft: Draft): FieldProblems {
  const problems: FieldProblems = {};
  if (draft.model.trim() === "") problems.model_name = "Enter a model.";
  for (const [field, name, isInteger] of NUMBERS) {
    const hidden = draft.spread && (name === "min" || name === "max");
    const problem = numberProblem(number(draft[name]), isInteger) || limitProblem(field, draft);
    if (!hidden && problem !== "") problems[field] = problem;
  }
  return problems;
}

function numberProblem(value: number, isInteger: boolean): string {
  if (Number.isFinite(value) && value >= 0 && (!isInteger || Number.isSafeInteger(value))) return "";
  return isInteger ? "Enter a whole number, or leave it empty." : "Enter a number, or leave it empty.";
}

/** The problem with a number that its meaning excludes; 0 is as good as empty. */
function limitProblem(field: Field, draft: Draft): string {
  const [most, relative] = [number(draft.max), number(draft.relative)];
  if (field === "min_replicas" && most > 0 && number(draft.min) > most) return `Enter at most the maximum, ${most}.`;
  if (field === "min_prefix_match" && number(draft.prefix) > 1) return "Enter 0 to 1, or leave it empty.";
  return field === "balance_rel_threshold" && relative > 0 && relative < 1 ? "Enter at least 1, or leave it empty." : "";
}

/** The field that the server refused, with its words; null if it named none of ours. */
export function refusedField(error: Error | null): { field: Field; words: string } | null {
  if (!(error instanceof ApiError) || error.status !== 400) return null;
  const knownFields: readonly string[] = ["model_name", "node_selector", "spread_all", "route_policy", ...NUMBERS.map(([field]) => field)];
  return knownFields.includes(error.field) ? { field: error.field as Field, words: error.message } : null;
}

/** The whole rule: what is empty is cleared, and a cleared routing field has to be named to be. */
export function bodyOf(draft: Draft): RuleRequest {
  return {
    model_name: draft.model.trim(),
    node_selector: { ...selectorIn(draft) },
    spread_all: draft.spread,
    min_replicas: draft.spread ? 0 : number(draft.min),
    max_replicas: draft.spread ? 0 : number(draft.max),
    route_policy: draft.policy,
    min_prefix_match: number(draft.prefix),
    balance_abs_threshold: number(draft.absolute),
    balance_rel_threshold: number(draft.relative),
  };
}

const KEY = ["scheduling", "rules"] as const;

/** The rules as they are: the feed says when they have changed, or a pass has looked at them. */
export function useRules(): UseQueryResult<Rule[]> {
  const queries = useQueryClient();
  useChange(useLive((state) => state.rules), () => void queries.invalidateQueries({ queryKey: KEY }));
  return useQuery({
    queryKey: KEY,
    queryFn: ({ signal }) => call(client.GET("/api/nodes/scheduling", { signal })),
    placeholderData: keepPreviousData,
  });
}

/** Reads the rules again; ends when they are there, or cannot be read. */
export function useReread(): () => Promise<void> {
  const queries = useQueryClient();
  return () => queries.invalidateQueries({ queryKey: KEY });
}

/** Makes the model's rule or replaces it. */
export function saveRule(draft: Draft): Promise<Rule> {
  return call(client.POST("/api/nodes/scheduling", { body: bodyOf(draft) }));
}

/** Deletes the model's rule; there need not be one. */
export function deleteRule(model: string): Promise<unknown> {
  return call(client.DELETE("/api/nodes/scheduling/{model}", { params: { path: { model } } }));
}
