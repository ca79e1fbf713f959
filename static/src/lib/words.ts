// The search of lists by words.

export function wordsOf(term: string): string[] {
  return term.toLowerCase().split(/\s+/).filter(Boolean);
}

/** True if every word of the search is in the text. */
export function matchesWords(term: string, text: string): boolean {
  const searched = text.normalize("NFKC").toLowerCase();
  return wordsOf(term.normalize("NFKC")).every((word) => searched.includes(word));
}
