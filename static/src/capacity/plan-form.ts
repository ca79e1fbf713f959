// A question of "what if": what is to be placed, and which nodes are added. It lives in the address, so that a plan can be
// sent to somebody else. Pure but for `usePlan`.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client, patient } from "../api/client";
import type { components } from "../api/schema";

type Schemas = components["schemas"];
export type Plan = Schemas["PlacementPlan"];
type Body = Schemas["PlacementPlanRequest"];

/** The form's values; empty ones are not sent. */
export interface PlanForm {
  /** A defined model, or nothing: then the need counts. */
  model: string;
  vram: string;
  disk: string;
  /** Tokens, with a file. */
  context: string;
  replicas: string;
  /** `tier=fast, zone=west`; instead of the rule's. */
  selector: string;
  add: string;
  addVram: string;
  addDisk: string;
  addLabels: string;
  addSlots: string;
}

const FIELDS = { model: "model", vram: "vram", disk: "disk", context: "context", replicas: "replicas", selector: "selector", add: "add", addVram: "add_vram", addDisk: "add_disk", addLabels: "add_labels", addSlots: "add_slots" } as const;
const FIELD_NAMES = Object.keys(FIELDS) as (keyof PlanForm)[];

export const BLANK: PlanForm = { model: "", vram: "", disk: "", context: "", replicas: "", selector: "", add: "", addVram: "", addDisk: "", addLabels: "", addSlots: "" };

export function parseForm(query: URLSearchParams): PlanForm {
  return Object.fromEntries(FIELD_NAMES.map((name) => [name, query.get(FIELDS[name]) ?? ""])) as unknown as PlanForm;
}

export function formAddress(form: PlanForm): URLSearchParams {
  return new URLSearchParams(FIELD_NAMES.filter((name) => form[name].trim() !== "").map((name) => [FIELDS[name], form[name].trim()]));
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

const INTEGER_FIELDS: readonly (keyof PlanForm)[] = ["context", "replicas", "add", "addSlots"];
const NUMBER_FIELDS: readonly (keyof PlanForm)[] = [...INTEGER_FIELDS, "vram", "disk", "addVram", "addDisk"];

/** Problems that the browser can detect, by field; the server checks the rest. */
export function validateForm(form: PlanForm, file: File | null): Partial<Record<keyof PlanForm, string>> {
  const problems: Partial<Record<keyof PlanForm, string>> = {};
  for (const name of NUMBER_FIELDS) {
    const value = Number(form[name]);
    const isInteger = INTEGER_FIELDS.includes(name);
    if (!Number.isFinite(value) || value < 0 || (isInteger && !Number.isInteger(value))) problems[name] = isInteger ? "Enter a whole number." : "Enter a number of GiB.";
  }
  for (const name of ["selector", "addLabels"] as const) if (labelsIn(form[name]) === null) problems[name] = "Enter labels as key=value, separated by commas.";
  if (file === null && form.model.trim() === "" && form.vram.trim() === "" && form.disk.trim() === "") problems.model = "Enter a model, choose a file, or enter how much memory it needs.";
  return problems;
}

const GIB = 1024 ** 3;

export function requestBody(form: PlanForm): Body {
  const number = (text: string) => Number(text.trim());
  const model = form.model.trim();
  const body: Body = model === "" ? { need: { vram: Math.round(number(form.vram) * GIB), disk: Math.round(number(form.disk) * GIB) } } : { model };
  if (number(form.replicas) > 0) body.replicas = number(form.replicas);
  if (form.selector.trim() !== "") body.selector = labelsIn(form.selector) ?? {};
  if (number(form.add) > 0) {
    const labels = labelsIn(form.addLabels) ?? {};
    const slots = number(form.addSlots);
    body.nodes = [{ count: number(form.add), vram_gib: number(form.addVram), disk_gib: number(form.addDisk), labels, ...(slots > 0 ? { max_replicas_per_model: slots } : {}) }];
  }
  return body;
}

/** The first bytes of a GGUF file that are sent; its header is within them. */
const HEADER_BYTES = 16 * 1024 * 1024;

/** The beginning of a GGUF file, which need not be on the server; only a small file is sent as a whole. */
async function fileBody(file: File, context: string): Promise<NonNullable<Body["file"]>> {
  const reader = new FileReader();
  const content = await new Promise<string>((resolve, reject) => {
    reader.onload = () => resolve(typeof reader.result === "string" ? reader.result : "");
    reader.onerror = () => reject(reader.error ?? new Error("the file cannot be read"));
    reader.readAsDataURL(file.slice(0, HEADER_BYTES));
  });
  return { size: file.size, header: content.slice(content.indexOf(",") + 1), ...(Number(context) > 0 ? { definition: { context_size: Number(context) } } : {}) };
}

async function fullBody(form: PlanForm, file: File | null): Promise<Body> {
  const { need, ...body } = requestBody(form);
  return file === null ? { ...body, ...(need === undefined ? {} : { need }) } : { ...body, file: await fileBody(file, form.context) };
}

/** A request of a plan; a file is not part of the address. */
export interface PlanQuestion {
  form: PlanForm;
  file: File | null;
}

/** The plan for the last request; null: there was none yet. */
export function usePlan(question: PlanQuestion | null): UseQueryResult<Plan> {
  const { form, file } = question ?? { form: BLANK, file: null };
  return useQuery({
    queryKey: ["placement", "plan", form, file?.name, file?.size, file?.lastModified],
    queryFn: async ({ signal }) => call(client.POST("/api/placement/plan", { body: await fullBody(form, file), signal, ...patient })),
    enabled: question !== null,
    gcTime: 0,
    retry: false,
  });
}
