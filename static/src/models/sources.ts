// Where models come from: what a pasted text is, the import of one of its variants, and the galleries' models.
import { keepPreviousData, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { call, client, patient } from "../api/client";
import type { Catalogue, ImportStarted, Source } from "./shapes";

/** Says what a text is, such as a name, an address or a definition; nothing is asked for an empty one. */
export function useSource(text: string): UseQueryResult<Source> {
  return useQuery({
    queryKey: ["models", "source", text],
    queryFn: ({ signal }) => call(client.POST("/api/sources/inspect", { body: { text }, signal, ...patient })),
    enabled: text !== "",
    retry: false,
  });
}

const LONGEST_SHOWN = 500;
const PLAIN = /^[\w.@:/ -]+$/;
/** A user before a host, with or without a password, also while it is typed: no port, nor a tag; and what is as long as a token. */
const SECRET = /\/\/[^/]*@|(?<!ollama:)\/\/[^/]*:(?!\d+\/)|:[^/\s]*@|\w{20,}/;

/** May be seen in the address: it has no part that may be a secret, such as a password, a query or a token. */
export function isShareable(text: string): boolean {
  return text.length <= LONGEST_SHOWN && PLAIN.test(text) && !SECRET.test(text);
}

export interface Import {
  text: string;
  variant: string;
  name: string;
  load: boolean;
}

/** Downloads a variant and defines the model; the answer does not wait for it. */
export function importModel({ text, variant, name, load }: Import): Promise<ImportStarted> {
  const body = { text, load, ...(variant === "" ? {} : { variant }), ...(name === "" ? {} : { name }) };
  return call(client.POST("/api/models/import", { body, ...patient }));
}

/** The filters of the catalogue; "" stands for all. */
export interface CatalogueFilter {
  term: string;
  task: string;
  licence: string;
  gallery: string;
  size: string;
  fits: boolean;
  page: number;
}

export const ITEMS = 24;
/** Largest size of the shown models in GiB, "" for any. */
export const SIZES = ["", "2", "8", "24", "80"] as const;
const GIB = 1024 ** 3;

export function useCatalogue({ term, task, licence, gallery, size, fits, page }: CatalogueFilter): UseQueryResult<Catalogue> {
  const chosen = Object.entries({ term, task, licence, gallery }).filter(([, value]) => value !== "");
  const query = { ...Object.fromEntries(chosen), ...(size === "" ? {} : { size: Number(size) * GIB }), ...(fits ? { fits: "true" as const } : {}), page, items: ITEMS };
  return useQuery({
    queryKey: ["models", "catalogue", query],
    queryFn: ({ signal }) => call(client.GET("/api/catalogue", { params: { query }, signal })),
    placeholderData: keepPreviousData,
  });
}

export function filterOf(query: URLSearchParams): CatalogueFilter {
  const text = (name: string) => query.get(name) ?? "";
  const size = SIZES.find((choice) => choice === query.get("size")) ?? "";
  return { term: text("q"), task: text("task"), licence: text("licence"), gallery: text("gallery"), size, fits: query.get("fits") === "true", page: Math.max(1, Math.floor(Number(query.get("page"))) || 1) };
}

export function filterAddress({ term, task, licence, gallery, size, fits, page }: CatalogueFilter): URLSearchParams {
  const entries = { q: term, task, licence, gallery, size, fits: fits ? "true" : "", page: page > 1 ? String(page) : "" };
  return new URLSearchParams(Object.entries(entries).filter(([, value]) => value !== ""));
}
