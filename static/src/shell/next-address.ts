// The address after signing in or choosing a password: a path of this app, or one of the server's other pages,
// which the browser loads in full. Never to another host, no matter what the address says.
const HOME = "/app/overview";

export interface Target {
  path: string;
  /** Not of this page: the browser has to load it. */
  load: boolean;
}

/** Path, search and hash of `wanted` if it leads to a page for people on this host, else the start page. */
export function safeNext(address: string | null, origin: string): Target {
  const url = onHost(address, origin);
  if (url === null) return { path: HOME, load: false };
  const path = `${url.pathname}${url.search}${url.hash}`;
  if (url.pathname === "/app" || url.pathname.startsWith("/app/")) return { path, load: false };
  // A generated password is asked for there too: the server leads on from what it may not show yet.
  if (url.pathname === "/api/docs" || url.pathname.startsWith("/admin/")) return { path, load: true };
  return { path: HOME, load: false };
}

function onHost(address: string | null, origin: string): URL | null {
  if (address === null || !address.startsWith("/")) return null;
  try {
    // As the browser would read it: `//host`, `/\host` and `/\t/host` are other hosts to it.
    const url = new URL(address, origin);
    return url.origin === origin ? url : null;
  } catch {
    return null;
  }
}

/** The sign-in page's address that comes back to here. */
export function signInPath(place: { pathname: string; search: string; hash: string }): string {
  const current = `${place.pathname}${place.search}${place.hash}`;
  return current === "/app" || current === HOME ? "/login" : `/login?next=${encodeURIComponent(current)}`;
}
