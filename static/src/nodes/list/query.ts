// The language of the filter's box: words look in name, address, labels and models; `field:value` in one thing;
// `key=value` in labels. All have to hold; the same field twice means one of them. Pure.
import type { LiveNode } from "../../live/messages";

export interface Query {
  words: readonly string[];
  /** Field to the values of which one has to hold. */
  fields: ReadonlyMap<Field, readonly string[]>;
  /** Label key to its values; an empty value stands for any. */
  labels: ReadonlyMap<string, readonly string[]>;
}

type Field = "status" | "gpu" | "type" | "model" | "backend" | "name" | "address";

const FIELDS: Readonly<Record<string, Field>> = {
  status: "status",
  state: "status",
  gpu: "gpu",
  vendor: "gpu",
  type: "type",
  model: "model",
  backend: "backend",
  name: "name",
  address: "address",
};

/** What people can type, for the hint of the box. */
export const EXAMPLE = "status:offline gpu:nvidia zone=west model:x backend:y type:agent";

/** Reads what was typed. What is no known field is a word: an address has a colon as well. */
export function parse(text: string): Query {
  const words: string[] = [];
  const fields = new Map<Field, string[]>();
  const labels = new Map<string, string[]>();
  // A quoted part may hold blanks: model:"a b".
  for (const token of text.match(/(?:[^\s"]+|"[^"]*"?)+/g) ?? []) {
    const plain = token.replaceAll('"', "").toLowerCase();
    const [, name = "", mark, value = ""] = /^([^:=]+)([:=])(.*)$/s.exec(plain) ?? [];
    const field = mark === ":" ? FIELDS[name] : undefined;
    // `model:` is being typed and asks for nothing yet.
    if (field !== undefined && value === "") continue;
    if (field !== undefined) add(fields, field, value);
    else if (mark === "=") add(labels, name, value);
    else if (plain !== "") words.push(plain);
  }
  return { words, fields, labels };
}

function add<Key>(into: Map<Key, string[]>, key: Key, value: string): void {
  const found = into.get(key);
  if (found === undefined) into.set(key, [value]);
  else found.push(value);
}

/** Whether the node is what was asked for. */
export function matches(query: Query, node: LiveNode): boolean {
  if (query.words.length > 0) {
    const text = searchable(node);
    if (!query.words.every((word) => text.includes(word))) return false;
  }
  for (const [field, values] of query.fields) if (!values.some((value) => TESTS[field](node, value))) return false;
  for (const [key, values] of query.labels) if (!hasLabel(node, key, values)) return false;
  return true;
}

const TESTS: Readonly<Record<Field, (node: LiveNode, value: string) => boolean>> = {
  status: (node, value) => node.status.startsWith(value),
  gpu: (node, value) => (value === "none" ? node.gpu_vendor === "" : node.gpu_vendor.toLowerCase().startsWith(value)),
  type: (node, value) => node.node_type.startsWith(value),
  model: (node, value) => node.models.some((model) => model.model_name.toLowerCase().includes(value)),
  backend: (node, value) =>
    node.backends.some((name) => name.toLowerCase().includes(value)) ||
    node.models.some((model) => model.backend_type.toLowerCase().includes(value)),
  name: (node, value) => node.name.toLowerCase().includes(value),
  address: (node, value) => `${node.address}\n${node.source_address}`.toLowerCase().includes(value),
};

function hasLabel(node: LiveNode, key: string, values: readonly string[]): boolean {
  return Object.entries(node.labels).some(
    ([name, found]) => name.toLowerCase() === key && values.some((value) => value === "" || value === found.toLowerCase()),
  );
}

const texts = new WeakMap<LiveNode, string>();

/** Everything of a node that words look in; made once for each state of it. */
function searchable(node: LiveNode): string {
  let text = texts.get(node);
  if (text === undefined) {
    const labels = Object.entries(node.labels).map(([key, value]) => `${key}=${value}`);
    const models = node.models.map((model) => model.model_name);
    text = [node.name, node.address, node.source_address, ...labels, ...models].join("\n").toLowerCase();
    texts.set(node, text);
  }
  return text;
}
