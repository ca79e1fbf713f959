"""Static files, served by the web process itself.

What the build of the page gives a hashed name never changes, so a browser keeps it forever; and it is sent
compressed if the build has left a `.gz` beside it.
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
"""Where files with hashed names lie, under `/static/`."""
_READING = ("GET", "HEAD")
_FOR_EVER = "public, max-age=31536000, immutable"
_GZIP = re.compile(r"(^|,)\s*gzip\s*(;\s*q=(?!0(\.0*)?\s*(,|$))[\d.]+\s*)?(,|$)", re.IGNORECASE)


class StaticFiles(ASGIStaticFilesHandler):
    """Django's handler; a path that leads out of the files, or can be no path, is as unknown as any other."""

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """The answer, whose type no browser guesses: Django's middleware is not on this way."""
        answer: HttpResponseBase = await super().get_response_async(request)
        answer["X-Content-Type-Options"] = "nosniff"
        return answer

    def serve(self, request: HttpRequest) -> HttpResponse | FileResponse:
        """The file, or Http404, which is all that the handler expects; 405 for any other method."""
        if request.method not in _READING:
            return HttpResponseNotAllowed(_READING)
        path = posixpath.normpath(self.file_path(request.path))
        try:
            if not path.startswith(HASHED):
                return serve(request, path, insecure=True)
            answer = serve(request, _best(request, path), insecure=True)
        except (SuspiciousOperation, ValueError) as error:
            raise Http404 from error
        answer["Cache-Control"] = _FOR_EVER
        patch_vary_headers(answer, ["Accept-Encoding"])
        return answer


def _best(request: HttpRequest, path: str) -> str:
    """The compressed file if there is one and the client takes it; Django reads the encoding off its name."""
    compressed = f"{path}.gz"
    wanted = accepts_gzip(request.headers.get("accept-encoding", ""))
    return compressed if wanted and finders.find(compressed) else path


def accepts_gzip(header: str) -> bool:
    """Whether this `Accept-Encoding` admits gzip."""
    return bool(_GZIP.search(header))
