// The language of the filter's box: words look in name, address, GPUs, labels and models, and name states; `field:value` looks
// in one thing; `key=value` in labels; `-` before any of them means "not". All have to hold; the same field twice means
// one of them. Pure.
import type { LiveNode } from "../../live/messages";
import { shownStatus, type ShownStatus } from "../shared/node-status";

export interface Query {
  words: readonly string[];
  /** Field to the values of which one has to hold. */
  fields: ReadonlyMap<Field, readonly string[]>;
  /** Label key to its values; an empty value stands for any. */
  labels: ReadonlyMap<string, readonly string[]>;
  /** None of these may hold. */
  not: readonly Test[];
  /** Sentences on what means nothing. */
  problems: readonly string[];
}

type Field = "status" | "gpu" | "type" | "model" | "backend" | "name" | "address";
type Test = (node: LiveNode) => boolean;

/** By the name that is typed; no object, which would know "constructor" too. */
const FIELDS: ReadonlyMap<string, Field> = new Map([
  ["status", "status"],
  ["state", "status"],
  ["gpu", "gpu"],
  ["vendor", "gpu"],
  ["type", "type"],
  ["model", "model"],
  ["backend", "backend"],
  ["name", "name"],
  ["address", "address"],
]);

const STATUSES: readonly ShownStatus[] = ["pending", "rejected", "offline", "unhealthy", "draining", "healthy"];
const TYPES = ["backend", "agent"];

/** The syntax of a query, with the meaning of each form. */
export const SYNTAX: readonly (readonly [string, string])[] = [
  ["a100 west", "both words in name, address, GPUs, labels or models"],
  ["offline", "a state by its name"],
  ["status:offline", "nodes in this state; two such terms match either state"],
  ["gpu:h100", "GPU name or vendor; gpu:none without a GPU"],
  ["model:llama", "has a replica of a model whose name contains this"],
  ["backend:vllm", "has a backend whose name contains this"],
  ["type:agent", "backend or agent"],
  ["name:n1  address:10.0", "in the name, in the address"],
  ["zone=west", "has this label"],
  ["zone=", "has any label of this key"],
  ["-zone=west", "excludes matches; can be put before any term"],
  ['zone="west 1"', "quotes allow spaces in a value"],
];

interface Token {
  /** In lower case, without quotation marks. */
  plain: string;
  negated: boolean;
}

/** A blank ends a token unless it is in quotation marks, or in a value that a label of these nodes has. */
function tokens(text: string, nodes: readonly LiveNode[]): Token[] {
  const result: Token[] = [];
  const next = /(?:[^\s"]+|"[^"]*"?)+/g;
  for (let match = next.exec(text); match !== null; match = next.exec(text)) {
    let raw = match[0];
    const [, key = "", value = ""] = /^-?([^:="]+)=([^"]*)$/s.exec(raw) ?? [];
    if (key !== "" && value !== "") {
      const start = match.index + raw.length - value.length;
      const longest = longestValue(text.slice(start).toLowerCase(), key.toLowerCase(), nodes);
      if (longest.length > value.length) {
        raw = text.slice(match.index, start + longest.length);
        next.lastIndex = start + longest.length;
      }
    }
    const negated = raw.length > 1 && raw.startsWith("-");
    result.push({ plain: (negated ? raw.slice(1) : raw).replaceAll('"', "").toLowerCase(), negated });
  }
  return result;
}

/** The longest value of the label with which this text begins as a word. */
function longestValue(text: string, key: string, nodes: readonly LiveNode[]): string {
  let longest = "";
  for (const { labels } of nodes) {
    for (const [name, labelValues] of Object.entries(labels)) {
      if (labelValues.length <= longest.length || name.toLowerCase() !== key) continue;
      const value = labelValues.toLowerCase();
      if (text.startsWith(value) && /^(\s|$)/.test(text.slice(value.length))) longest = value;
    }
  }
  return longest;
}

/** Reads what was typed; `nodes` tells which values of labels have blanks. What is no field is a word: an address has a colon. */
export function parse(text: string, nodes: readonly LiveNode[] = []): Query {
  const words: string[] = [];
  const fields = new Map<Field, string[]>();
  const labels = new Map<string, string[]>();
  const not: Test[] = [];
  const problems: string[] = [];
  for (const { plain, negated } of tokens(text, nodes)) {
    const [, name = "", mark, value = ""] = /^([^:=]+)([:=])(.*)$/s.exec(plain) ?? [];
    const field = mark === ":" ? FIELDS.get(name) : undefined;
    // `model:` is being typed and asks for nothing yet.
    if (plain === "" || (field !== undefined && value === "")) continue;
    const problem = describeProblem(field, name, mark, value);
    if (problem !== "") problems.push(problem);
    if (negated) not.push(alone(plain, field, mark === "=" ? name : null, value));
    else if (field !== undefined) add(fields, field, value);
    else if (mark === "=") add(labels, name, value);
    else words.push(plain);
  }
  return { words, fields, labels, not, problems };
}

/** One condition as a test. */
function alone(plain: string, field: Field | undefined, label: string | null, value: string): Test {
  if (field !== undefined) return (node) => TESTS[field](node, value);
  return label === null ? (node) => hasWord(node, plain) : (node) => hasLabel(node, label, [value]);
}

/** Why this can find nothing; "" if it can. */
function describeProblem(field: Field | undefined, name: string, mark: string | undefined, value: string): string {
  if (field === "status" && !STATUSES.some((status) => status.startsWith(value))) return `There is no state “${value}”: ${STATUSES.join(", ")}.`;
  if (field === "type" && !TYPES.some((type) => type.startsWith(value))) return `There is no type “${value}”: ${TYPES.join(", ")}.`;
  // An address may be a word: a host's name and a port, or hexadecimal groups.
  const isWord = mark !== ":" || field !== undefined || !/^[a-z_-]+$/.test(name) || /^[\d/]*$/.test(value) || /^[a-f]+$/.test(name);
  return isWord ? "" : `There is no field “${name}”. Fields: ${[...FIELDS.keys()].join(", ")}. For a label write ${name}=${value}.`;
}

function add<Key>(into: Map<Key, string[]>, key: Key, value: string): void {
  const collected = into.get(key);
  if (collected === undefined) into.set(key, [value]);
  else collected.push(value);
}

/** True if the node matches the query. */
export function matches(query: Query, node: LiveNode): boolean {
  if (!query.words.every((word) => hasWord(node, word))) return false;
  for (const [field, values] of query.fields) if (!values.some((value) => TESTS[field](node, value))) return false;
  for (const [key, values] of query.labels) if (!hasLabel(node, key, values)) return false;
  return !query.not.some((test) => test(node));
}

const TESTS: Readonly<Record<Field, (node: LiveNode, value: string) => boolean>> = {
  status: (node, value) => shownStatus(node).startsWith(value),
  gpu: (node, value) => (value === "none" ? node.gpu_vendor === "" : gpuTexts(node).some((text) => text.toLowerCase().includes(value))),
  type: (node, value) => node.node_type.startsWith(value),
  model: (node, value) => node.models.some((model) => model.model_name.toLowerCase().includes(value)),
  backend: (node, value) =>
    node.backends.some((name) => name.toLowerCase().includes(value)) ||
    node.models.some((model) => model.backend_type.toLowerCase().includes(value)),
  name: (node, value) => node.name.toLowerCase().includes(value),
  address: (node, value) => `${node.address}\n${node.source_address}`.toLowerCase().includes(value),
};

function hasWord(node: LiveNode, word: string): boolean {
  return shownStatus(node) === word || searchable(node).includes(word);
}

function hasLabel(node: LiveNode, key: string, values: readonly string[]): boolean {
  return Object.entries(node.labels).some(
    ([name, labelValue]) => name.toLowerCase() === key && values.some((value) => value === "" || value === labelValue.toLowerCase()),
  );
}

/** Vendor and names of a node's GPUs; none without a GPU. */
function gpuTexts(node: LiveNode): string[] {
  return [node.gpu_vendor, ...new Set(node.gpus.map((gpu) => gpu.name))];
}

const texts = new WeakMap<LiveNode, string>();

/** Everything of a node that words look in; made once for each state of it. */
function searchable(node: LiveNode): string {
  let text = texts.get(node);
  if (text === undefined) {
    const labels = Object.entries(node.labels).map(([key, value]) => `${key}=${value}`);
    const models = node.models.map((model) => model.model_name);
    text = [node.name, node.address, node.source_address, ...gpuTexts(node), ...labels, ...models].join("\n").toLowerCase();
    texts.set(node, text);
  }
  return text;
}
