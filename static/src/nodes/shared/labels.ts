// The rules of labels, checked before the request.

const LONGEST_KEY = 128;
const LONGEST_VALUE = 255;

/** The problem with the key; "" if there is none. */
export function keyProblem(key: string): string {
  if (key.trim() === "") return "Enter a key.";
  if (key.length > LONGEST_KEY) return `A key can have at most ${LONGEST_KEY} characters.`;
  if (key.split("/").some((part) => part === "." || part === "..")) return "A key must not contain . or .. as a path segment";
  return "";
}

/** The problem with the value; "" if there is none. An empty value is valid. */
export function valueProblem(value: string): string {
  return value.length > LONGEST_VALUE ? `A value can have at most ${LONGEST_VALUE} characters.` : "";
}

/** The registry's own labels: it writes them again when the worker registers. */
export function isAutomatic(key: string): boolean {
  return key === "node.name" || key === "node.replica-slots" || key === "gpu.vendor" || key === "gpu.vram";
}

/** Its value is the node's replica slots, which Capacity shows and sets. */
const OF_CAPACITY = "node.replica-slots";

/** The labels that pages list, by key. */
export function listedLabels({ labels }: { labels: Readonly<Record<string, string>> }): [string, string][] {
  return Object.entries(labels)
    .filter(([key]) => key !== OF_CAPACITY)
    .sort(([left], [right]) => left.localeCompare(right));
}

/** A label as one word: `zone=west`, or only the key if the value is empty. */
export function written(key: string, value: string): string {
  return value === "" ? key : `${key}=${value}`;
}
