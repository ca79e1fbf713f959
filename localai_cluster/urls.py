"""Every Django URL. The raw ASGI routes in front of Django are in `routing.py`."""

from collections.abc import Callable

from django.contrib import admin
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, include, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from django.views.generic import RedirectView

from localai_cluster import health
from localai_cluster.documents import DocsView, SchemaView
from localai_cluster.shell import BrandingView, FeaturesView, VersionView
from localai_cluster.web.page import page

handler400 = "localai_cluster.web.envelopes.bad_request"
handler404 = "localai_cluster.web.page.not_found"
handler500 = "localai_cluster.web.envelopes.server_error"


def _moved(where: str) -> Callable[..., HttpResponseBase]:
    """A page that has another address; it changes nothing, so a POST is refused by its method."""
    return csrf_exempt(require_safe(RedirectView.as_view(url=where, permanent=True, query_string=True)))


urlpatterns: list[URLPattern | URLResolver] = [
    path("", _moved("/app")),
    path("browse", _moved("/app")),
    path("browse/<path:rest>", _moved("/app/%(rest)s")),
    path("favicon.svg", _moved("/static/favicon.svg")),
    path("app", page),
    path("app/<path:path>", page),
    path("login", page),
    path("version", VersionView.as_view()),
    path("healthz", health.healthz),
    path("readyz", health.readyz),
    path("api/auth/", include("localai_cluster.accounts.urls")),
    path("api/features", FeaturesView.as_view()),
    path("api/branding", BrandingView.as_view()),
    path("api/", include("nodes.api.urls")),
    path("api/", include("operations.api.urls")),
    path("api/schema", SchemaView.as_view(), name="schema"),
    path("api/docs", DocsView.as_view(url_name="schema")),
    path("admin/", admin.site.urls),
]
