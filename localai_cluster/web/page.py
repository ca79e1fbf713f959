"""The page: one document for every path that a person can open; it loads its data through the API.

It holds no data and is equal for all users, so it needs no session. Its policy allows only files of this
host; styles that the page creates at run time carry the nonce of its response.
"""

import secrets

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.csrf import csrf_exempt, ensure_csrf_cookie
from django.views.decorators.http import require_safe

from localai_cluster.web import envelopes, ui
from localai_cluster.web.policy import CSP, policy

_NOT_FOR_PEOPLE = ("/api/", "/v1/", "/ws/", "/static/", "/assets/", "/locales/", "/admin/")
_NOT_BUILT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>LocalAI Cluster</title></head>
<body><h1>The page is not built</h1>
<p>Run <code>make ui</code> on the server, then load this page again. <code>make run</code> does it too.</p>
<p>The API works without it.</p></body></html>
"""


@csrf_exempt  # it changes nothing: a POST is refused because of its method, not of a missing token
@require_safe
def page(request: HttpRequest, path: str = "") -> HttpResponseBase:
    """Return the page; 503 with the build command while it is not built."""
    return _page(request, 200)


@ensure_csrf_cookie
def _page(request: HttpRequest, status: int) -> HttpResponseBase:
    build, nonce = ui.current_build(), secrets.token_urlsafe(16)
    if build is None:
        response = HttpResponse(_NOT_BUILT, status=503)
    else:
        response = render(request, "app.html", {"build": build, "nonce": nonce}, status=status)
    response["Cache-Control"] = "no-cache"
    response[CSP] = policy(styles=nonce)
    return response


def not_found(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Return for Django's `handler404` the page if a browser opens an unknown path, otherwise JSON."""
    is_navigation = request.method in ("GET", "HEAD") and "text/html" in request.headers.get("accept", "")
    if (
        is_navigation
        and ui.current_build()
        and request.content_type != "application/json"
        and not f"{request.path}/".startswith(_NOT_FOR_PEOPLE)
    ):
        return _page(request, 404)
    return envelopes.not_found(request, exception)
