"""The API document and its pages, for signed-in users; a browser without a session is sent to sign in."""

import secrets
import threading
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpResponseBase, HttpResponseRedirect, JsonResponse
from django.templatetags.static import static
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer2
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse, extend_schema
from drf_spectacular.views import SpectacularSwaggerView
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts.authentication import CHALLENGE, IsUser
from localai_cluster.accounts.passwords import PasswordChangeRequired
from localai_cluster.web.envelopes import exception_handler
from localai_cluster.web.openapi import Operation, refusals
from localai_cluster.web.policy import CSP, policy
from nodes.api import worker_routes as _workers  # noqa: F401 - registers its schemes

_ONE_AT_A_TIME = threading.Lock()
"""The library fills its tables while it generates the first document, and fails if two threads do so."""


class SchemaView(APIView):
    """`/api/schema`: the OpenAPI document as JSON.

    Without the library's own view, whose `lang` and `version` parameters end in headers and settings.
    """

    permission_classes = [IsUser]
    renderer_classes = [OpenApiJsonRenderer2]

    @extend_schema(
        operation_id="schema",
        summary="Download the OpenAPI document",
        tags=["documents"],
        responses={200: OpenApiResponse(OpenApiTypes.OBJECT, "This document."), **refusals(401)},
    )
    def get(self, request: Request) -> Response:
        """This document."""
        generator: Any = SchemaGenerator  # untyped by its library
        with _ONE_AT_A_TIME:
            return Response(generator().get_schema(request=request, public=True))


class DocsView(SpectacularSwaggerView):
    """`/api/docs`: the interactive pages."""

    permission_classes = [IsUser]
    template_name = "docs.html"

    @extend_schema(exclude=True)
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """The library's viewer in the product's own page; inline scripts carry the nonce of this answer."""
        library: Any = super()  # untyped
        answer: Response = library.get(request, *args, **kwargs)
        nonce = secrets.token_urlsafe(16)
        answer.data |= {"nonce": nonce, "css_href": static("docs.css"), "favicon_href": static("favicon.svg")}
        answer[CSP] = policy(scripts=nonce, styles=nonce)
        del answer["Cross-Origin-Opener-Policy"]  # it opens no window of others
        return answer

    def handle_exception(self, exc: Exception) -> Any:
        """Redirect browsers to the sign-in, or to the change of a generated password; else refuse."""
        if _is_browser(self.request) and (first := _where_first(exc)):
            return HttpResponseRedirect(f"{first}?{urlencode({'next': self.request.get_full_path()})}")
        refusal = exception_handler(exc, {"view": self})
        return _as_json(refusal) if refusal is not None else super().handle_exception(exc)


def _where_first(exc: Exception) -> str:
    if isinstance(exc, PasswordChangeRequired):
        return settings.PASSWORD_URL
    return settings.LOGIN_URL if isinstance(exc, exceptions.NotAuthenticated) else ""


def _is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _as_json(refusal: Response) -> HttpResponseBase:
    answer = JsonResponse(refusal.data, status=refusal.status_code)
    if refusal.status_code == 401:
        answer["WWW-Authenticate"] = CHALLENGE
    return answer


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The admin key or a user's API key."""

    target_class = "localai_cluster.accounts.authentication.BearerAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """Return the scheme of `Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "LOCALAI_API_KEY or a user's key (lac-…)."}


class CookieScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A browser's session."""

    target_class = "localai_cluster.accounts.authentication.CookieAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """Return the scheme of the session cookie."""
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}


class SignInScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The session cookie, which suffices to sign out and to change the password before all other routes."""

    target_class = "localai_cluster.accounts.authentication.SignInAuthentication"
    name = "signedIn"


class RememberingScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The session cookie, which stays valid for a few minutes while the database is away."""

    target_class = "localai_cluster.accounts.authentication.RememberingAuthentication"
    name = "recentSession"
