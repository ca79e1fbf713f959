"""The page: the HTML document for every path that a person can open, its build, and static files.

The document holds no data and is equal for all users, so it needs no session; it loads its data through the
API. Paths differ only in the code that the browser loads at once, so that nothing is loaded one after the
other. Its policy allows only files of this host; styles that the page creates at run time carry the nonce of
its response.

Vite's manifest names the files of `static/dist` that the page loads; the build adds the paths that each
module serves. It is cached and read again when the file changes, so that a new build is served with the next
page. A file with a hashed name never changes, so a browser caches it forever. It is sent compressed if the
build has written a `.gz` file beside it.
"""

import hashlib
import json
import logging
import mimetypes
import posixpath
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.contrib.staticfiles.views import serve
from django.core.exceptions import SuspiciousOperation
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.views.decorators.csrf import csrf_exempt, ensure_csrf_cookie
from django.views.decorators.http import require_safe

from localai_cluster.web import envelopes, wire
from localai_cluster.web.policy import CSP_HEADER, content_security_policy

log = logging.getLogger(__name__)

ENTRY_MODULE = "src/main.tsx"
"""Entry module of the page in Vite's manifest."""
_BUILD_ID_DIGITS = 16


@dataclass(frozen=True)
class PageBuild:
    """A build of the page. File paths are relative to `static/dist`, in the order of loading."""

    id: str
    script: str
    styles: tuple[str, ...]
    preloads: tuple[str, ...]
    pages: Mapping[str, tuple[str, ...]]
    """Further scripts that each path below `/app/` needs; `nodes/*` means all paths below `nodes/`."""

    def preloads_of(self, path: str) -> tuple[str, ...]:
        """Return the scripts that the browser loads at once for a path below `/app/`."""
        below = f"{path.partition('/')[0]}/*"
        return self.preloads + self.pages.get(path if path in self.pages or "/" not in path else below, ())


def current_build() -> PageBuild | None:
    """Return the current build of the page, None if it is missing or unreadable."""
    manifest = settings.UI_DIST / "manifest.json"
    try:
        status = manifest.stat()
        return _read_manifest(manifest, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be read: %s; build again", manifest, type(error).__name__)
        return None


def build_id() -> str:
    """Return the hash of the current build, "" without one. A page with another hash is out of date."""
    build = current_build()
    return build.id if build is not None else ""


@lru_cache(maxsize=1)
def _read_manifest(manifest: Path, changed_at: int, size: int) -> PageBuild:
    raw = manifest.read_bytes()
    chunks = json.loads(raw)
    visited = {ENTRY_MODULE}
    needed = [chunks[ENTRY_MODULE], *(chunks[key] for key in _static_imports(chunks, ENTRY_MODULE, visited))]
    pages = {
        path: tuple(str(chunks[one]["file"]) for one in (key, *_static_imports(chunks, key, {key, *visited})))
        for key, chunk in chunks.items()
        for path in chunk.get("paths", ())
    }
    return PageBuild(
        id=hashlib.sha256(raw).hexdigest()[:_BUILD_ID_DIGITS],
        script=str(needed[0]["file"]),
        styles=tuple(dict.fromkeys(str(style) for chunk in needed for style in chunk.get("css", ()))),
        preloads=tuple(str(chunk["file"]) for chunk in needed[1:]),
        pages=pages,
    )


def _static_imports(chunks: dict[str, Any], key: str, visited: set[str]) -> Iterator[str]:
    """Yield the modules that `key` imports, recursively, each once. `visited` collects them."""
    for name in chunks[key].get("imports", ()):
        if name not in visited:
            visited.add(name)
            yield name
            yield from _static_imports(chunks, name, visited)


_API_PATH_PREFIXES = ("/api/", "/v1/", "/ws/", "/static/", "/assets/", "/locales/", "/admin/")
_NOT_BUILT_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>LocalAI Cluster</title></head>
<body><h1>The page is not built</h1>
<p>Run <code>make ui</code> on the server, then load this page again. <code>make run</code> does it too.</p>
<p>The API works without it.</p></body></html>
"""


@csrf_exempt  # it changes nothing: a POST is refused because of its method, not of a missing token
@require_safe
def page(request: HttpRequest, path: str = "") -> HttpResponseBase:
    """Return the page. While it is not built, return 503 with the build command."""
    return _render_page(request, 200, path)


@csrf_exempt
@require_safe
def root(request: HttpRequest) -> HttpResponseBase:
    """Redirect a browser to the page. Ollama's clients check at this address whether a server runs."""
    if "text/html" not in request.headers.get("accept", ""):
        return HttpResponse("Ollama is running", content_type="text/plain; charset=utf-8")
    query = request.META.get("QUERY_STRING", "")
    response = HttpResponseRedirect(f"/app?{query}" if query else "/app")
    patch_vary_headers(response, ["Accept"])
    return response


@ensure_csrf_cookie
def _render_page(request: HttpRequest, status: int, path: str = "") -> HttpResponseBase:
    build, nonce = current_build(), secrets.token_urlsafe(16)
    if build is None:
        response = HttpResponse(_NOT_BUILT_PAGE, status=503)
    else:
        shown = {"build": build, "preloads": build.preloads_of(path), "nonce": nonce}
        response = render(request, "app.html", shown, status=status)
    response["Cache-Control"] = "no-cache"
    response[CSP_HEADER] = content_security_policy(styles=nonce)
    return response


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Return the page to a browser that opens an unknown path, otherwise JSON (Django's `handler404`)."""
    is_navigation = request.method in ("GET", "HEAD") and "text/html" in request.headers.get("accept", "")
    if (
        is_navigation
        and current_build()
        and request.content_type != "application/json"
        and not f"{request.path}/".startswith(_API_PATH_PREFIXES)
    ):
        return _render_page(request, 404)
    return envelopes.not_found(request, exception)


_ASSET_PATH_PATTERN = re.compile(r"/static/ui/assets/(\w[\w.-]*)", re.ASCII)
"""Path of a file with a hashed name."""
_READING_METHODS = ("GET", "HEAD")
_ASSET_HEADERS = (
    (b"cache-control", b"public, max-age=31536000, immutable"),
    (b"vary", b"Accept-Encoding"),
    (b"x-content-type-options", b"nosniff"),
)
_ACCEPTS_GZIP_PATTERN = re.compile(
    r"(^|,)\s*gzip\s*(;\s*q=(?!0(\.0*)?\s*(,|$))[\d.]+\s*)?(,|$)", re.IGNORECASE
)


class StaticFiles(ASGIStaticFilesHandler):
    """Django's handler of static files. A path outside of the folder, or an invalid one, gets 404.

    Files with hashed names are answered without Django, whose request and threads cost ten times as much.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Respond to a request for a static file."""
        found = _ASSET_PATH_PATTERN.fullmatch(scope["path"]) if scope["method"] in _READING_METHODS else None
        asset = _read_asset(found[1], scope["headers"]) if found else None
        if asset is None:
            await super().__call__(scope, receive, send)
        else:
            await wire.send_answer(send, asset)  # the server sends no body for HEAD

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """Return the response with `nosniff`. Django's middleware does not run for static files."""
        response: HttpResponseBase = await super().get_response_async(request)
        response["X-Content-Type-Options"] = "nosniff"
        return response

    def serve(self, request: HttpRequest) -> HttpResponse | FileResponse:
        """Return the file, or 405 for a method other than GET and HEAD. Raise no error except Http404."""
        if request.method not in _READING_METHODS:
            return HttpResponseNotAllowed(_READING_METHODS)
        try:
            return serve(request, posixpath.normpath(self.file_path(request.path)), insecure=True)
        except (SuspiciousOperation, ValueError) as error:
            raise Http404 from error


def _read_asset(name: str, headers: Iterable[wire.Header]) -> wire.Answer | None:
    """Return a file with a hashed name, compressed if the client accepts it; None without the file."""
    file = settings.UI_DIST / "assets" / name
    kind = (mimetypes.guess_type(name)[0] or "application/octet-stream").encode()
    accepted = b",".join(value for header, value in headers if header == b"accept-encoding")
    if accepts_gzip(accepted.decode("latin-1")):
        with suppress(OSError):
            body = file.with_name(f"{name}.gz").read_bytes()
            return wire.Answer(body, headers=((b"content-encoding", b"gzip"), *_ASSET_HEADERS), kind=kind)
    with suppress(OSError):
        return wire.Answer(file.read_bytes(), headers=_ASSET_HEADERS, kind=kind)
    return None


def accepts_gzip(header: str) -> bool:
    """Return True if this `Accept-Encoding` header admits gzip."""
    return bool(_ACCEPTS_GZIP_PATTERN.search(header))
