// Where to go after signing in: only to a path of this page, whatever the address says.
const HOME = "/app/nodes";

/** The path, search and hash of `wanted` if this page has it, else the start page. */
export function safeNext(wanted: string | null, origin: string): string {
  if (wanted === null || !wanted.startsWith("/")) return HOME;
  let url: URL;
  try {
    // As the browser would read it: `//host`, `/\host` and `/\t/host` are other hosts to it.
    url = new URL(wanted, origin);
  } catch {
    return HOME;
  }
  const here = url.origin === origin && (url.pathname === "/app" || url.pathname.startsWith("/app/"));
  return here ? `${url.pathname}${url.search}${url.hash}` : HOME;
}

/** The sign-in page's address that comes back to here. */
export function signInPath(place: { pathname: string; search: string; hash: string }): string {
  const here = `${place.pathname}${place.search}${place.hash}`;
  return here === "/app" || here === HOME ? "/login" : `/login?next=${encodeURIComponent(here)}`;
}
