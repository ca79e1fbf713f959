"""`/join` and `/join/wheel`: what a machine fetches that is about to join (`localai_cluster/join_script.py`).

Open to anyone who may register (registration token, usable join token) and to admins.
"""

from typing import TYPE_CHECKING, Any

from django.http import HttpResponse
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from localai_cluster import join_script
from localai_cluster.accounts import principals
from localai_cluster.accounts.authentication import (
    CHALLENGE,
    BearerAuthentication,
    CookieAuthentication,
    client_address,
    person_of,
    principal,
)
from localai_cluster.kit import clock, conf, errors
from localai_cluster.web import throttle
from localai_cluster.web.openapi import Operation, refusals
from nodes.api.base import NodeView
from nodes.registry import identity, joining

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView

SCRIPT, WHEEL = "text/x-shellscript", "application/zip"


class JoinAuthentication(BaseAuthentication):
    """A token that lets a worker register; wrong ones are counted. People are for the next ones."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """A joining machine, None for a person; 401 for a wrong token, 429 after too many of them."""
        offered = principals.bearer(request.headers.get("authorization", ""))
        if not offered:
            return None
        throttle.shared().check(client_address(request), clock.now())
        try:
            return self._admitted(request, offered)
        except identity.WrongCredential:
            throttle.shared().note(client_address(request), clock.now())
            raise

    @staticmethod
    def _admitted(request: Request, offered: str) -> tuple[Any, None] | None:
        if joining.is_join_token(offered):
            joining.recognise(offered, "", clock.now())
            return principals.JOINING, None
        if principals.is_registration_token(offered):
            return principals.JOINING, None
        if person_of(request).is_authenticated:
            return None
        raise identity.WrongCredential("invalid registration token")

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


class JoinScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A join token or the registration token."""

    target_class = "nodes.api.join.JoinAuthentication"
    name = "joinToken"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "Join token or registration token."}


class MayJoin(BasePermission):
    """Joining machines and admins."""

    message = "admin access required"

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Whether the caller holds a token to register with, or is an admin."""
        who = principal(request)
        return who.kind == "joining" or who.is_admin


class JoinView(NodeView):
    """What both routes share."""

    authentication_classes = [JoinAuthentication, BearerAuthentication, CookieAuthentication]
    permission_classes = [MayJoin]


class ScriptView(JoinView):
    """`/join`."""

    @extend_schema(
        operation_id="join",
        summary="Get the script that adds a machine",
        tags=["worker"],
        responses={(200, SCRIPT): OpenApiTypes.STR, **refusals(401, 403, 429)},
    )
    def get(self, request: Request) -> HttpResponse:
        """A POSIX shell script that installs and starts the worker; it contains no secret.

        If the server has no worker package, the script says so and stops.
        """
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        return _private(HttpResponse(join_script.script(wheel), content_type=f"{SCRIPT}; charset=utf-8"))


class WheelView(JoinView):
    """`/join/wheel`."""

    @extend_schema(
        operation_id="join_wheel",
        summary="Get the worker package",
        tags=["worker"],
        responses={(200, WHEEL): OpenApiTypes.BINARY, **refusals(401, 403, 429, 503)},
    )
    def get(self, request: Request) -> HttpResponse:
        """The Python wheel of the worker, as the script installs it. 503 if the server has none."""
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        try:
            content = wheel.path.read_bytes() if wheel else None
        except OSError:
            content = None  # replaced or removed in this moment
        if wheel is None or content is None:
            raise errors.Unavailable(join_script.NO_WHEEL)
        answer = HttpResponse(content, content_type=WHEEL)
        answer["Content-Disposition"] = f'attachment; filename="{wheel.path.name}"'
        return _private(answer)


def _private(answer: HttpResponse) -> HttpResponse:
    answer["Cache-Control"] = "private, no-store"
    return answer
