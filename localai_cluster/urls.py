"""All Django URLs. The raw ASGI routes in front of Django are in `edge.py`."""

from collections.abc import Callable

from django.contrib import admin
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, include, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from django.views.generic import RedirectView

from localai_cluster import health
from localai_cluster.shell import BrandingView, FeaturesView, VersionView
from localai_cluster.system_health import SystemHealthView
from localai_cluster.web.page import page, root
from nodes.api import catalogue, cluster_backends, engines, installed, join, model_gallery, stock
from operations.api import jobs

handler400 = "localai_cluster.web.envelopes.bad_request"
handler404 = "localai_cluster.web.page.not_found"
handler500 = "localai_cluster.web.envelopes.server_error"


def _redirect_to(target: str) -> Callable[..., HttpResponseBase]:
    """Return a view that redirects to a page's new address.

    The view changes nothing: it refuses a POST by its method and needs no CSRF check.
    """
    return csrf_exempt(require_safe(RedirectView.as_view(url=target, permanent=True, query_string=True)))


@csrf_exempt
def _serve_document(request: HttpRequest, view: str) -> HttpResponseBase:
    """Serve the API document or its pages; the first request imports them."""
    from localai_cluster import api_document

    views = {"schema": api_document.SchemaView.as_view, "docs": api_document.DocsView.as_view}
    return views[view]()(request)


urlpatterns: list[URLPattern | URLResolver] = [
    path("", root),
    path("browse", _redirect_to("/app")),
    path("browse/<path:rest>", _redirect_to("/app/%(rest)s")),
    path("favicon.svg", _redirect_to("/static/favicon.svg")),
    path("app", page, {"path": "overview"}),
    path("app/<path:path>", page),
    path("login", page),
    path("join", join.ScriptView.as_view()),
    path("join/wheel", join.WheelView.as_view()),
    path("version", VersionView.as_view()),
    path("healthz", health.healthz),
    path("readyz", health.readyz),
    # The reference's other names (§3.9, §4.3, §4.5).
    path("backends", installed.InstalledView.as_view()),
    path("backends/upgrades", installed.OtherUpgradesView.as_view()),
    path("backends/upgrades/check", installed.OtherUpgradeCheckView.as_view()),
    path("backends/available", catalogue.AvailableView.as_view()),
    path("backends/known", catalogue.KnownView.as_view()),
    path("backends/galleries", catalogue.GalleriesView.as_view()),
    path("backends/apply", cluster_backends.ApplyView.as_view()),
    path("backends/upgrade/<str:name>", cluster_backends.PlainUpgradeView.as_view()),
    path("backends/delete/<str:name>", cluster_backends.PlainDeleteView.as_view()),
    path("backends/jobs", jobs.BackendJobsView.as_view()),
    path("backends/jobs/<str:uid>", jobs.JobStatusView.as_view()),
    path("models/available", model_gallery.AvailableModelsView.as_view()),
    path("models/galleries", model_gallery.ModelGalleriesView.as_view()),
    path("models/apply", model_gallery.ApplyModelView.as_view()),
    path("models/import-uri", model_gallery.ImportUriView.as_view()),
    path("models/jobs", jobs.ModelJobsView.as_view()),
    path("models/jobs/<str:uid>", jobs.ModelJobStatusView.as_view()),
    path("api/auth/", include("localai_cluster.accounts.sign_in")),
    path("api/features", FeaturesView.as_view()),
    path("api/branding", BrandingView.as_view()),
    # Its fixed paths, such as `operations/history`, precede the routes with ids.
    path("api/", include("operations.api.urls")),
    path("api/", include("nodes.api.urls")),
    path("backend/load", engines.LoadView.as_view()),
    path("backend/shutdown", engines.ShutdownView.as_view()),
    path("backend/monitor", engines.MonitorView.as_view()),
    path("system", stock.SystemView.as_view()),
    path("models/reload", stock.ReloadView.as_view()),
    path("models/delete/<text:model>", stock.StockDeleteView.as_view()),
    path("models/toggle-pinned/<text:model>/<str:action>", stock.PinView.as_view()),
    path("api/system/health", SystemHealthView.as_view()),
    path("api/schema", _serve_document, {"view": "schema"}, name="schema"),
    path("api/docs", _serve_document, {"view": "docs"}),
    path("admin/", admin.site.urls),
]
