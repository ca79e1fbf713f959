// The rules of a field that is edited in place, and of the two values that are: pure, so that they can be tested.

/** The most that the server takes as replica cap. */
const LARGEST_CAP = 10_000;
const LONGEST_BUDGET = 32;

/** The result of Enter: nothing has changed, the value is invalid, or it is saved. */
export type Decision = { kind: "close" } | { kind: "refuse"; why: string } | { kind: "save"; value: string };

/** `check` answers what is wrong with the typed text, "" if nothing is. */
export function decide(typed: string, present: string, check: (text: string) => string): Decision {
  const value = typed.trim();
  if (value === present.trim()) return { kind: "close" };
  const why = check(value);
  return why === "" ? { kind: "save", value } : { kind: "refuse", why };
}

/** True if the value changed while a person was typing, by something else. */
export function overtaken(opened: string, present: string): boolean {
  return opened.trim() !== present.trim();
}

/** The problem with a replica cap. */
export function capProblem(text: string): string {
  const value = Number(text);
  if (!/^\d+$/.test(text) || value < 1 || value > LARGEST_CAP) return `Enter a whole number from 1 to ${LARGEST_CAP}.`;
  return "";
}

const UNITS: Readonly<Record<string, number>> = {
  b: 1,
  kb: 1000,
  mb: 1000 ** 2,
  gb: 1000 ** 3,
  tb: 1000 ** 4,
  kib: 1024,
  mib: 1024 ** 2,
  gib: 1024 ** 3,
  tib: 1024 ** 4,
};
const BUDGET = /^(\d+(?:\.\d+)?|\.\d+)\s*(%|b|[kmgt]i?b)?$/i;

/** Bytes of `total` that a budget leaves, 0 for no cap; null if it is none. As the server reads it (R1.49). */
export function ceiling(text: string, total: number): number | null {
  const plain = text.trim().toLowerCase();
  if (plain === "") return 0;
  const match = BUDGET.exec(plain);
  if (match === null) return null;
  const amount = amountOf(Number(match[1]), match[2] ?? "", total);
  return amount === null ? null : Math.min(Math.trunc(amount), total);
}

function amountOf(number: number, unit: string, total: number): number | null {
  if (unit === "%") return number > 100 ? null : (total * number) / 100;
  if (unit !== "") return number * (UNITS[unit] ?? 1);
  if (number <= 1) return total * number;
  return Number.isInteger(number) ? number : null;
}

/** The problem with a VRAM budget; an empty one means no cap. */
export function budgetProblem(text: string): string {
  if (text.length > LONGEST_BUDGET) return `At most ${LONGEST_BUDGET} characters.`;
  return ceiling(text, Number.MAX_SAFE_INTEGER) === null ? "Enter a percentage such as 80%, or a size such as 12GB or 12GiB." : "";
}

/** The problem with a disk quota; an empty one means no limit. */
export function quotaProblem(text: string): string {
  if (text.trim() !== "" && ceiling(text, Number.MAX_SAFE_INTEGER) === 0) return "Enter at least one byte. Leave empty for no limit.";
  return budgetProblem(text);
}

/** The model with most replicas, and how many; null without any. */
export function mostReplicas(models: readonly { model_name: string }[]): { model: string; count: number } | null {
  const counts = new Map<string, number>();
  for (const { model_name } of models) counts.set(model_name, (counts.get(model_name) ?? 0) + 1);
  let most: { model: string; count: number } | null = null;
  for (const [model, count] of counts) if (most === null || count > most.count) most = { model, count };
  return most;
}
