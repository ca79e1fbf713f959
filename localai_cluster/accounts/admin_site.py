"""The admin's site: people come in by the product's own sign-in, whose failures are counted.

What Django's own site does with a visitor it does not admit is to send him to its sign-in page. Here that one
only finds out where he has to go. The module lies outside of `nodes.admin`, whose modules register with the
site while they are imported.
"""

from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.http import HttpRequest, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme

from localai_cluster.accounts import passwords


class Site(AdminSite):
    """For staff whose password is their own."""

    site_header = site_title = "LocalAI Cluster"
    index_title = "Registry and operations"
    site_url = settings.LOGIN_REDIRECT_URL

    def get_urls(self) -> list[Any]:
        """Django's, without its way to an object's public page: no object has one, and odd ids break it."""
        return [url for url in super().get_urls() if getattr(url, "name", "") != "view_on_site"]

    def has_permission(self, request: HttpRequest) -> bool:
        """Whether the visitor may see the admin at all."""
        return super().has_permission(request) and not passwords.must_change(request.user)

    def login(self, request: HttpRequest, extra_context: Any = None) -> HttpResponseRedirect:
        """Sends the visitor on: to sign in, to change a generated password, to what he wanted, or away."""
        wanted = request.GET.get(REDIRECT_FIELD_NAME, "")
        if not url_has_allowed_host_and_scheme(
            wanted, {request.get_host()}, require_https=request.is_secure()
        ):
            wanted = reverse("admin:index", current_app=self.name)
        if self.has_permission(request):
            return HttpResponseRedirect(wanted)
        if not request.user.is_authenticated:
            return _with_next(settings.LOGIN_URL, wanted)
        if passwords.must_change(request.user):
            return _with_next(settings.PASSWORD_URL, wanted)
        return HttpResponseRedirect(settings.LOGIN_REDIRECT_URL)

    def password_change(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Sends the visitor to the page, which counts guesses at the present password."""
        return HttpResponseRedirect(settings.PASSWORD_URL)


def _with_next(page: str, wanted: str) -> HttpResponseRedirect:
    """To a page that leads on to `wanted`, a path of this host."""
    return HttpResponseRedirect(f"{page}?{urlencode({REDIRECT_FIELD_NAME: wanted})}")
