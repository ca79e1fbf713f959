"""The admin site, which uses the product's own sign-in, whose failures are counted.

Django's site redirects visitors without access to its own sign-in page. Here that page only redirects to the
product's. The index starts with the tables that administrators use; tables for diagnosis follow under one
heading. The module is outside of `nodes.admin`, whose modules register with the site at their import.
"""

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.admin.actions import delete_selected
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import BadRequest
from django.db import DataError, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme

from localai_cluster.accounts import audit, passwords
from localai_cluster.accounts.audit import Change

APP_NAME_BY_LABEL = {
    "nodes": "Nodes and models",
    "operations": "Operations",
    "accounts": "API keys and audit",
    "auth": "Users and groups",
    "django_q": "Schedules",
}
"""Display names of the apps by label, in the order of the index."""
INTERNAL_MODEL_NAMES = frozenset(
    {
        "ControllerBeat",
        "Failure",
        "InitialPassword",
        "ModelLoadInfo",
        "OperationTarget",
        "OrmQ",
        "PendingBackendOp",
        "ReplicaUse",
        "Sequence",
        "Success",
        "WebProcess",
    }
)
"""Names of models that only help to diagnose the cluster. The index lists them last."""


def _app_position(app: Any) -> int:
    order = list(APP_NAME_BY_LABEL)
    return order.index(app["app_label"]) if app["app_label"] in order else len(order)


def _internal_tables(models: list[Any]) -> dict[str, Any]:
    return {
        "name": "Internal tables",
        "app_label": "internal",
        "app_url": "",
        "has_module_perms": True,
        "models": sorted(models, key=lambda model: str(model["name"])),
    }


@wraps(delete_selected)
def _delete_selected(admin: Any, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
    """Delete the selected rows as Django does, and write an audit entry for each row.

    Django sends no signal when it deletes several rows.
    """
    name = admin.opts.verbose_name
    rows = [Change("admin.deleted", f"{name} {row}", str(row.pk)) for row in queryset]
    with transaction.atomic():
        answer = delete_selected(admin, request, queryset)
        if answer is None and len(rows) > 1:
            audit.record(*rows)
    return answer


def _refuse_impossible_addresses(view: Callable[..., Any]) -> Callable[..., Any]:
    """Return a view that answers 404 to an id, and 400 to a filter, that the database cannot use in time."""

    @wraps(view)
    def checked(request: HttpRequest, *args: Any, **named: Any) -> Any:
        if "\0" in request.path:
            raise Http404("no id contains NUL")
        if any("regex" in name for name in request.GET):
            raise BadRequest("no list is filtered by a regular expression")
        try:
            return view(request, *args, **named)
        except (DataError, OverflowError, ValueError) as error:
            if request.GET and not _is_raised_by_product(error):
                raise BadRequest("a filter has an impossible value") from error
            raise

    return checked


_PACKAGES = frozenset({"django", "localai_cluster", "nodes", "operations"})
"""Packages whose code raises the errors of an admin page, or calls what raises them."""


def _is_raised_by_product(error: Exception) -> bool:
    """Return True if code of this project raised the error, not Django for a value of the address."""
    packages = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    deepest = next((package for package in reversed(packages) if package in _PACKAGES), "django")
    return deepest != "django"


class Site(AdminSite):
    """Admin site for staff. A user with a generated password must change it first."""

    site_header = site_title = "LocalAI Cluster"
    index_title = "Administration"
    site_url = settings.LOGIN_REDIRECT_URL

    def __init__(self, name: str = "admin") -> None:
        super().__init__(name)
        self.disable_action("delete_selected")
        self.add_action(_delete_selected, "delete_selected")

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        """Return the view for staff only; an impossible id or filter in the address is refused."""
        return super().admin_view(_refuse_impossible_addresses(view), cacheable)

    def get_urls(self) -> list[Any]:
        """Return Django's URLs without `view_on_site`.

        No object has a public page, and some ids break Django's view.
        """
        return [url for url in super().get_urls() if getattr(url, "name", "") != "view_on_site"]

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:
        """Return the apps with readable names. Internal tables come last, under a heading of their own."""
        apps = super().get_app_list(request, app_label)
        internal: list[Any] = []
        for app in apps:
            app["name"] = APP_NAME_BY_LABEL.get(app["app_label"], app["name"])
            if app_label is None:
                internal += [model for model in app["models"] if model["object_name"] in INTERNAL_MODEL_NAMES]
                app["models"] = [
                    model for model in app["models"] if model["object_name"] not in INTERNAL_MODEL_NAMES
                ]
        groups = sorted((app for app in apps if app["models"]), key=_app_position)
        return [*groups, _internal_tables(internal)] if internal else groups

    def has_permission(self, request: HttpRequest) -> bool:
        """Return True if the visitor may use the admin."""
        return super().has_permission(request) and not passwords.must_change(request.user)

    def login(self, request: HttpRequest, extra_context: Any = None) -> HttpResponseRedirect:
        """Redirect to the sign-in page, the page that changes a generated password, or the requested page.

        Without a requested page the target is the start page of the admin.
        """
        target = request.GET.get(REDIRECT_FIELD_NAME, "")
        if not url_has_allowed_host_and_scheme(
            target, {request.get_host()}, require_https=request.is_secure()
        ):
            target = reverse("admin:index", current_app=self.name)
        if self.has_permission(request):
            return HttpResponseRedirect(target)
        if not request.user.is_authenticated:
            return _redirect_with_next(settings.LOGIN_URL, target)
        if passwords.must_change(request.user):
            return _redirect_with_next(settings.PASSWORD_URL, target)
        return HttpResponseRedirect(settings.LOGIN_REDIRECT_URL)

    def password_change(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Redirect to the product's own page, which limits guesses of the current password."""
        return HttpResponseRedirect(settings.PASSWORD_URL)


def _redirect_with_next(page: str, target: str) -> HttpResponseRedirect:
    """Redirect to `page`, which later redirects to `target`, a path of this host."""
    return HttpResponseRedirect(f"{page}?{urlencode({REDIRECT_FIELD_NAME: target})}")
