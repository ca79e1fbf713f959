// Moves the focus after an answer of the server, which may come late.

/**
 * Puts the focus on `target`, unless the person has gone on to something else meanwhile: it is then neither in `from`,
 * where the question was asked, nor lost to something around `target`.
 */
export function goOnAt(target: HTMLElement | null, from: Element | null = null): void {
  const present = document.activeElement ?? document.body;
  if (from?.contains(present) === true || present.contains(target)) target?.focus();
}
