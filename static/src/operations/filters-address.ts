// What the filters of History and those of Changes have in common: the empty text stands for no filter. Pure.

/** The address of these filters, and what the server is asked. */
export function addressOf<Filters extends Record<keyof Filters, string>>(filters: Filters): URLSearchParams {
  return new URLSearchParams(Object.entries<string>(filters).filter(([, value]) => value !== ""));
}

export function isNarrowed<Filters extends Record<keyof Filters, string>>(filters: Filters): boolean {
  return Object.values<string>(filters).some((value) => value !== "");
}

/** An ISO time in the address; "" if it is none. */
export function timeIn(query: URLSearchParams, name: string): string {
  const at = Date.parse(query.get(name) ?? "");
  return Number.isNaN(at) ? "" : new Date(at).toISOString();
}
