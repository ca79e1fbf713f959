"""Static files, served by the web process itself.

A file with a hashed name from the page's build never changes, so a browser caches it forever. It is sent
compressed if the build has written a `.gz` file beside it.
"""

import posixpath
import re

from django.contrib.staticfiles import finders
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.contrib.staticfiles.views import serve
from django.core.exceptions import SuspiciousOperation
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.http.response import HttpResponseBase
from django.utils.cache import patch_vary_headers

HASHED = "ui/assets/"
"""Folder of the files with hashed names, under `/static/`."""
_READING = ("GET", "HEAD")
_FOR_EVER = "public, max-age=31536000, immutable"
_GZIP = re.compile(r"(^|,)\s*gzip\s*(;\s*q=(?!0(\.0*)?\s*(,|$))[\d.]+\s*)?(,|$)", re.IGNORECASE)


class StaticFiles(ASGIStaticFilesHandler):
    """Django's handler; a path outside of the folder, or an invalid one, gets 404 like an unknown one."""

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """Return the response with `nosniff`, because Django's middleware does not run for static files."""
        response: HttpResponseBase = await super().get_response_async(request)
        response["X-Content-Type-Options"] = "nosniff"
        return response

    def serve(self, request: HttpRequest) -> HttpResponse | FileResponse:
        """Return the file, or 405 for a method other than GET and HEAD; raise only Http404."""
        if request.method not in _READING:
            return HttpResponseNotAllowed(_READING)
        path = posixpath.normpath(self.file_path(request.path))
        try:
            if not path.startswith(HASHED):
                return serve(request, path, insecure=True)
            response = serve(request, _best_encoding(request, path), insecure=True)
        except (SuspiciousOperation, ValueError) as error:
            raise Http404 from error
        response["Cache-Control"] = _FOR_EVER
        patch_vary_headers(response, ["Accept-Encoding"])
        return response


def _best_encoding(request: HttpRequest, path: str) -> str:
    """Return the compressed file if there is one and the client accepts gzip; Django sets the encoding."""
    compressed = f"{path}.gz"
    accepts_compressed = accepts_gzip(request.headers.get("accept-encoding", ""))
    return compressed if accepts_compressed and finders.find(compressed) else path


def accepts_gzip(header: str) -> bool:
    """Return True if this `Accept-Encoding` admits gzip."""
    return bool(_GZIP.search(header))
