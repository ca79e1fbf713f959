"""Cross-origin requests of pages (CORS) on inference routes, for the origins of `CLUSTER_CORS_ORIGINS`.

Pages of other origins authenticate with a key. Credentials of browsers are never allowed, so no page of
another origin uses a session. A preflight has no key; it tells only that the route exists.
"""

import re

from localai_cluster.kit import conf
from localai_cluster.web.wire import Answer, Header, Scope

_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(?:, ?[A-Za-z0-9_-]{1,64}){0,63}")
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-correlation-id, x-localai-node, retry-after")
_KEPT_FOR = (b"access-control-max-age", b"600")


def allowed_origin(scope: Scope) -> bytes:
    """Return the origin of the request if its pages may use inference, "" otherwise."""
    origins = conf.cluster().cors_origins
    if not origins:
        return b""
    origin: bytes = next((value for name, value in scope["headers"] if name == b"origin"), b"")
    return origin if origin and ("*" in origins or origin.decode("latin-1").lower() in origins) else b""


def response_headers(origin: bytes) -> tuple[Header, ...]:
    """Return the headers of a response to a page of this allowed origin."""
    return ((b"access-control-allow-origin", origin), (b"vary", b"Origin"), _EXPOSED)


def preflight(scope: Scope, method: str) -> Answer | None:
    """Return the answer to a preflight for a route with this method, None for any other request."""
    headers = dict(scope["headers"])
    if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
        return None
    wanted: bytes = headers.get(b"access-control-request-headers", b"")
    allowed = [(b"access-control-allow-methods", method.encode()), _KEPT_FOR]
    if _NAMES.fullmatch(wanted.decode("latin-1")):
        allowed.append((b"access-control-allow-headers", wanted))
    return Answer(b"", headers=tuple(allowed), kind=b"text/plain")
