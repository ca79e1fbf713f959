// A question of "what if": what is to be placed, and which nodes are added. It lives in the address, so that a plan can be
// sent to somebody else. Pure but for `usePlan`.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client } from "../api/client";
import type { components } from "../api/schema";

type Schemas = components["schemas"];
export type Plan = Schemas["PlacementPlan"];
type Body = Schemas["PlacementPlanRequest"];

/** As it is typed; what is empty is not said. */
export interface Wish {
  /** A defined model, or nothing: then the need counts. */
  model: string;
  vram: string;
  disk: string;
  replicas: string;
  /** `tier=fast, zone=west`; instead of the rule's. */
  selector: string;
  add: string;
  addVram: string;
  addDisk: string;
  addLabels: string;
  addSlots: string;
}

const FIELDS = { model: "model", vram: "vram", disk: "disk", replicas: "replicas", selector: "selector", add: "add", addVram: "add_vram", addDisk: "add_disk", addLabels: "add_labels", addSlots: "add_slots" } as const;
const NAMES = Object.keys(FIELDS) as (keyof Wish)[];

export const BLANK: Wish = { model: "", vram: "", disk: "", replicas: "", selector: "", add: "", addVram: "", addDisk: "", addLabels: "", addSlots: "" };

export function wishIn(query: URLSearchParams): Wish {
  return Object.fromEntries(NAMES.map((name) => [name, query.get(FIELDS[name]) ?? ""])) as unknown as Wish;
}

export function addressOf(wish: Wish): URLSearchParams {
  return new URLSearchParams(NAMES.filter((name) => wish[name].trim() !== "").map((name) => [FIELDS[name], wish[name].trim()]));
}

/** `tier=fast, zone=west 1` as labels; null if a part has no `=`. */
export function labelsIn(text: string): Record<string, string> | null {
  const parts = text.split(",").map((part) => part.trim()).filter((part) => part !== "");
  const pairs = parts.map((part) => {
    const at = part.indexOf("=");
    return at < 1 ? null : ([part.slice(0, at).trim(), part.slice(at + 1).trim()] as const);
  });
  return pairs.includes(null) ? null : Object.fromEntries(pairs.filter((pair) => pair !== null));
}

const WHOLE: readonly (keyof Wish)[] = ["replicas", "add", "addSlots"];
const NUMBERS: readonly (keyof Wish)[] = [...WHOLE, "vram", "disk", "addVram", "addDisk"];

/** What cannot be asked, by field; the server judges the rest. */
export function wrongIn(wish: Wish): Partial<Record<keyof Wish, string>> {
  const wrong: Partial<Record<keyof Wish, string>> = {};
  for (const name of NUMBERS) {
    const value = Number(wish[name]);
    const whole = WHOLE.includes(name);
    if (!Number.isFinite(value) || value < 0 || (whole && !Number.isInteger(value))) wrong[name] = whole ? "Enter a whole number." : "Enter a number of GiB.";
  }
  for (const name of ["selector", "addLabels"] as const) if (labelsIn(wish[name]) === null) wrong[name] = "Write labels as key=value, with commas between them.";
  if (wish.model.trim() === "" && wish.vram.trim() === "" && wish.disk.trim() === "") wrong.model = "Enter a model, or how much memory it needs.";
  return wrong;
}

const GIB = 1024 ** 3;

export function bodyOf(wish: Wish): Body {
  const number = (text: string) => Number(text.trim());
  const model = wish.model.trim();
  const body: Body = model === "" ? { need: { vram: Math.round(number(wish.vram) * GIB), disk: Math.round(number(wish.disk) * GIB) } } : { model };
  if (number(wish.replicas) > 0) body.replicas = number(wish.replicas);
  if (wish.selector.trim() !== "") body.selector = labelsIn(wish.selector) ?? {};
  if (number(wish.add) > 0) {
    const labels = labelsIn(wish.addLabels) ?? {};
    const slots = number(wish.addSlots);
    body.nodes = [{ count: number(wish.add), vram_gib: number(wish.addVram), disk_gib: number(wish.addDisk), labels, ...(slots > 0 ? { max_replicas_per_model: slots } : {}) }];
  }
  return body;
}

/** The plan for what was last asked; null: nothing was asked yet. */
export function usePlan(asked: Wish | null): UseQueryResult<Plan> {
  return useQuery({
    queryKey: ["placement", "plan", asked],
    queryFn: ({ signal }) => call(client.POST("/api/placement/plan", { body: bodyOf(asked ?? BLANK), signal })),
    enabled: asked !== null,
    staleTime: 0,
    gcTime: 0,
    retry: false,
  });
}
