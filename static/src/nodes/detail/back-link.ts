// The list's address with its filter, from this tab's history if the browser provides it.

/** The part of the Navigation API that is used; TypeScript's library has not got it yet. */
interface History {
  currentEntry: { index: number } | null;
  entries: () => readonly { url: string | null }[];
}

/** The query of the latest of these addresses that is the list's, "" if there is none. */
export function latestFilter(addresses: readonly (string | null)[], list: string): string {
  for (const address of addresses.toReversed()) {
    if (address === null) continue;
    const { pathname, search } = new URL(address);
    if (pathname === list) return search;
  }
  return "";
}

/** The list's filter when it was last open in this tab. */
export function keptFilter(list: string): string {
  const { navigation } = window as { navigation?: History };
  const position = navigation?.currentEntry?.index;
  if (navigation === undefined || position === undefined) return "";
  return latestFilter(
    navigation
      .entries()
      .slice(0, position)
      .map((entry) => entry.url),
    list,
  );
}
