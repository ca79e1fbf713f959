// The definitions of models: the list, one of them, its revisions, and every change to them.
import { keepPreviousData, useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import { useAction, type Action } from "../api/action";
import { call, client } from "../api/client";
import { useChange, useLive } from "../live/hooks";
import { isActive, type LiveState } from "../live/store";
import type { DefinitionDetail, DefinitionPreview, DefinitionRow, Revision, UnusableFile } from "./shapes";

const LIST = ["models", "defined"] as const;
/** What the chat and the search know of models. */
const CAPABILITIES = ["models", "definitions"] as const;
/** One of them, and its revisions. */
const ONE = ["models", "definition"] as const;
/** Definitions in one answer. */
const PAGE = 500;

export interface Definitions {
  rows: readonly DefinitionRow[];
  unusable: readonly UnusableFile[];
}

async function fetchDefinitions(signal: AbortSignal): Promise<Definitions> {
  const rows: DefinitionRow[] = [];
  for (let page = 1; ; page += 1) {
    const list = await call(client.GET("/api/definitions", { params: { query: { page, items: PAGE } }, signal }));
    rows.push(...list.definitions);
    if (list.definitions.length === 0 || rows.length >= list.total) return { rows, unusable: list.unusable };
  }
}

/** Operations that change definitions: how many run, and how many have ended. */
function changes({ operations }: LiveState): string {
  const total = { active: 0, ended: 0 };
  for (const operation of operations.values()) if (operation.kind === "model_import" || operation.kind === "definition_delete") total[isActive(operation) ? "active" : "ended"] += 1;
  return `${total.active} ${total.ended}`;
}

/** Has the lists of definitions read again when an operation may have changed them. */
export function useDefinitionChanges(): void {
  const queries = useQueryClient();
  useChange(useLive(changes), () => {
    for (const queryKey of [LIST, CAPABILITIES]) void queries.invalidateQueries({ queryKey });
  });
}

/** All definitions. Files change without notice: they are read again when a person returns to the page. */
export function useDefinitionList(): UseQueryResult<Definitions> {
  useDefinitionChanges();
  return useQuery({ queryKey: LIST, queryFn: ({ signal }) => fetchDefinitions(signal), refetchOnWindowFocus: true });
}

const RATES_MS = 15_000;

/** Requests a second of the models that run, over the last minute. */
export function useRates(): ReadonlyMap<string, number> {
  const query = useQuery({
    queryKey: ["models", "rates"],
    queryFn: async ({ signal }) => {
      const { models } = await call(client.GET("/api/figures/models", { signal }));
      return new Map(models.map(({ name, requests_per_second }) => [name, requests_per_second]));
    },
  });
  useChange(useLive((state) => state.beats), () => {
    if (!query.isFetching && Date.now() - query.dataUpdatedAt >= RATES_MS) void query.refetch();
  });
  return query.data ?? NO_RATES;
}

const NO_RATES: ReadonlyMap<string, number> = new Map();

export function useDefinition(name: string): UseQueryResult<DefinitionDetail> {
  return useQuery({
    queryKey: [...ONE, name],
    queryFn: ({ signal }) => call(client.GET("/api/definitions/{name}", { params: { path: { name } }, signal })),
    staleTime: 0,
  });
}

export function useRevisions(name: string): UseQueryResult<readonly Revision[]> {
  return useQuery({
    queryKey: [...ONE, name, "revisions"],
    queryFn: async ({ signal }) => (await call(client.GET("/api/definitions/{name}/revisions", { params: { path: { name } }, signal }))).revisions,
    staleTime: 0,
  });
}

/** An edit: the whole text, or the fields of the form that were changed. */
export type Edit = { text: string } | { changes: Record<string, unknown> };

/** What an edit would do; nothing is saved. The answer for the edit before stays until the next one is there. */
export function usePreview(name: string, edit: Edit | null): UseQueryResult<DefinitionPreview> {
  return useQuery({
    queryKey: ["models", "preview", name, edit],
    queryFn: ({ signal }) => call(client.POST("/api/definitions/preview", { body: { ...(name === "" ? {} : { name }), ...edit }, signal })),
    enabled: edit !== null,
    placeholderData: keepPreviousData,
    staleTime: 0,
    gcTime: 0,
    retry: false,
  });
}

export interface Save {
  edit: Edit;
  /** The revision that was edited. */
  revision: number;
  reason: string;
}

export function saveDefinition(name: string, { edit, revision, reason }: Save): Promise<DefinitionDetail> {
  return call(client.PUT("/api/definitions/{name}", { params: { path: { name } }, body: { ...edit, revision, ...(reason === "" ? {} : { reason }) } }));
}

export function cloneDefinition(name: string, newName: string): Promise<DefinitionDetail> {
  return call(client.POST("/api/definitions/{name}/clone", { params: { path: { name } }, body: { name: newName } }));
}

export function setDisabled(name: string, disabled: boolean): Promise<DefinitionDetail> {
  return call(client.POST(`/api/definitions/{name}/${disabled ? "disable" : "enable"}`, { params: { path: { name } } }));
}

/** `newest`: the revision that the person has seen. */
export function restoreRevision(name: string, number: number, newest: number): Promise<DefinitionDetail> {
  return call(client.POST("/api/definitions/{name}/revisions/{number}/restore", { params: { path: { name, number } }, body: { revision: newest } }));
}

/** Has the replicas drained, then the definition removed. */
export function deleteDefinition(name: string, withFiles: boolean): Promise<unknown> {
  return call(client.DELETE("/api/definitions/{name}", { params: { path: { name }, query: withFiles ? { files: true } : {} } }));
}

/** Changes a definition and has everything that is shown of definitions read again, also after a refusal. */
export function useDefinitionAction<Input, Output>(work: (input: Input) => Promise<Output>, done: string | ((output: Output, input: Input) => unknown)): Action<Input> {
  const queries = useQueryClient();
  return useAction(async (input: Input) => {
    try {
      return await work(input);
    } finally {
      for (const queryKey of [LIST, CAPABILITIES, ONE]) void queries.invalidateQueries({ queryKey });
    }
  }, done);
}
