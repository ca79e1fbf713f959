"""Every Django URL. The raw ASGI routes in front of Django are in `routing.py`."""

from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from django.views.generic import RedirectView

from nodes.api import health
from nodes.api.documents import DocsView, SchemaView

handler400 = "nodes.api.envelopes.bad_request"
handler404 = "nodes.api.envelopes.not_found"
handler500 = "nodes.api.envelopes.server_error"

admin.site.site_header = admin.site.site_title = "LocalAI Cluster"
admin.site.index_title = "Registry and operations"
admin.site.site_url = "/api/docs"

urlpatterns: list[URLPattern | URLResolver] = [
    # Changes nothing, so a POST is refused by its method and not for want of a CSRF token.
    path("", csrf_exempt(require_safe(RedirectView.as_view(pattern_name="admin:index")))),
    path("healthz", health.healthz),
    path("readyz", health.readyz),
    path("api/", include("nodes.api.urls")),
    path("api/", include("operations.api.urls")),
    path("api/schema", SchemaView.as_view(), name="schema"),
    path("api/docs", DocsView.as_view(url_name="schema")),
    path("admin/", admin.site.urls),
]
