// The definitions of models: the list, one of them, its revisions, and every change to them.
import { keepPreviousData, useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import { useAction, type Action } from "../api/action";
import { call, client } from "../api/client";
import { useChange, useLive } from "../live/hooks";
import { useRefreshed } from "../live/refreshed";
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

/** Reads once more, from the start, if definitions came or went between the pages: one may have moved to a page before. */
async function fetchDefinitions(signal: AbortSignal, attempts = 2): Promise<Definitions> {
  const rows = new Map<string, DefinitionRow>();
  let total: number | null = null;
  for (let page = 1, read = 0; ; page += 1) {
    const list = await call(client.GET("/api/definitions", { params: { query: { page, items: PAGE } }, signal }));
    if (total !== null && list.total !== total && attempts > 0) return fetchDefinitions(signal, attempts - 1);
    total = list.total;
    for (const row of list.definitions) rows.set(row.name, row);
    read += list.definitions.length;
    if (list.definitions.length === 0 || read >= list.total) return { rows: [...rows.values()], unusable: list.unusable };
  }
}

/** Has what is shown of definitions read again when the feed says that they have changed. */
export function useDefinitionChanges(): void {
  const queries = useQueryClient();
  useChange(useLive((state) => state.definitions), () => {
    for (const queryKey of [LIST, CAPABILITIES, ONE]) void queries.invalidateQueries({ queryKey });
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
  return useRefreshed(query, RATES_MS).data ?? NO_RATES;
}

const NO_RATES: ReadonlyMap<string, number> = new Map();

export function useDefinition(name: string): UseQueryResult<DefinitionDetail> {
  return useQuery({
    queryKey: [...ONE, name],
    queryFn: ({ signal }) => call(client.GET("/api/definitions/{name}", { params: { path: { name } }, signal })),
  });
}

export const REVISIONS_STEP = 20;
/** The most that one answer has. */
export const MOST_REVISIONS = 1000;

/** The newest revisions; those before stay until more are there. */
export function useRevisions(name: string, items: number = REVISIONS_STEP): UseQueryResult<readonly Revision[]> {
  return useQuery({
    queryKey: [...ONE, name, "revisions", items],
    placeholderData: keepPreviousData,
    queryFn: async ({ signal }) => (await call(client.GET("/api/definitions/{name}/revisions", { params: { path: { name }, query: { items } }, signal }))).revisions,
  });
}

/** An edit: the whole text, or the fields of the form that were changed. */
export type Edit = { text: string } | { changes: Record<string, unknown> };

/** What an edit would do to `revision`, the newest one; nothing is saved. The answer for the edit before stays until the
 * next one is there. */
export function usePreview(name: string, revision: number, edit: Edit | null): UseQueryResult<DefinitionPreview> {
  return useQuery({
    queryKey: ["models", "preview", name, revision, edit],
    queryFn: ({ signal }) => call(client.POST("/api/definitions/preview", { body: { ...(name === "" ? {} : { name }), ...edit }, signal })),
    enabled: edit !== null,
    placeholderData: keepPreviousData,
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
