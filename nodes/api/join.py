"""Join tokens, and the script and package that a joining machine downloads.

A token is shown once, in the response that created it. `/join` and `/join/wheel` are open to admins and to
every holder of a registration token or a usable join token.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import join_script
from localai_cluster.accounts import authentication, principals
from localai_cluster.kit import addresses, clock, conf, errors
from localai_cluster.web import rest, throttle
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import NullIsAbsent, Text, Whole, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, TIME, Named, Row, Shape, count, field
from localai_cluster.web.shapes import UUID as UUID_FORMAT
from nodes.api.base import MOMENT, PAGE, NodeView, actor_of
from nodes.api.worker_routes import parse_id
from nodes.models import JoinToken
from nodes.registry import identity, joining, listing

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView


DEFAULT_PAGE_SIZE = 100
JOIN_TOKEN_STATE = Named(
    "JoinTokenState", {"type": "string", "enum": [state.value for state in joining.TokenState]}
)
_TOKEN_EXAMPLE = "join-" + "0" * 64
_URL_EXAMPLE = "http://192.0.2.10:8080"
_TOKEN_FIELDS = [
    field("id", UUID_FORMAT, example="0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44"),
    field("state", JOIN_TOKEN_STATE.ref, example="usable"),
    field("note", TEXT, example="rack 4"),
    field("created_at", TIME, example=MOMENT),
    field("created_by", TEXT, example="ann"),
    field("expires_at", TIME, example="2026-08-22T10:15:04.120394Z"),
    field("max_uses", count(1), "How many new nodes it admits.", example=1),
    field("uses", count(), "How many it has admitted.", example=0),
    field("revoked_at", TIME, optional=True),
    field("revoked_by", TEXT, optional=True),
    field("last_used_at", TIME, optional=True),
    field("last_used_by", TEXT, "Name of the node that joined last.", optional=True),
]
JOIN_TOKEN_SHAPE = Shape("JoinToken", "A join token, without the token.", _TOKEN_FIELDS)
CREATED_TOKEN_SHAPE = Shape(
    "MadeJoinToken",
    "A new join token. `token` and `command` are shown this once.",
    [
        *_TOKEN_FIELDS,
        field("token", {"type": "string", "pattern": "^join-[0-9a-f]{64}$"}, example=_TOKEN_EXAMPLE),
        field(
            "command",
            TEXT,
            "The line to run on the other machine; it contains the token.",
            example=join_script.join_command(_URL_EXAMPLE, _TOKEN_EXAMPLE),
        ),
        field("url", TEXT, "The server's URL in that line.", example=_URL_EXAMPLE),
        field(
            "url_is_set",
            FLAG,
            "True if the URL is CLUSTER_PUBLIC_URL, false if it is the address of this request.",
            example=True,
        ),
        field(
            "warnings", TEXTS, "Why the line may not work on another machine, and what it risks.", example=[]
        ),
    ],
)


class JoinTokenRequestSerializer(NullIsAbsent):
    """Validity and maximum number of nodes of a new join token, and a note."""

    lifetime_seconds = Whole(
        required=False,
        min_value=joining.MIN_LIFETIME,
        max_value=joining.MAX_LIFETIME,
        schema={"default": joining.DEFAULT_LIFETIME},
    )
    uses = Whole(required=False, min_value=1, max_value=joining.MAX_USES, schema={"default": 1})
    note = Text(required=False, max_length=joining.MAX_NOTE_LENGTH)
    url = Text(
        required=False,
        max_length=addresses.MAX_URL_LENGTH,
        help_text="Base URL for the command if CLUSTER_PUBLIC_URL is not set.",
    )


def token_rows(tokens: Iterable[JoinToken], now: datetime) -> list[Row]:
    return [JOIN_TOKEN_SHAPE.of_object(token, state=joining.state(token, now).value) for token in tokens]


class JoinTokensView(NodeView):
    """`/api/join-tokens`."""

    @describe(
        "join_tokens",
        "List join tokens",
        JOIN_TOKEN_SHAPE.many,
        refused=(400,),
        parameters=PAGE,
    )
    def get(self, request: Request) -> Response:
        """Returns the join tokens, newest first, without the secret texts.

        Expired tokens stay for as long as events are kept.
        """
        page = listing.parse_page(
            listing.Parameters(request.query_params, "limit", "offset"), DEFAULT_PAGE_SIZE
        )
        tokens = JoinToken.objects.all()
        rows = token_rows(tokens[page.part], clock.now())
        return Response(rows, headers=page.headers(request, tokens.count()))

    @describe(
        "join_tokens_make",
        "Make a join token",
        CREATED_TOKEN_SHAPE,
        status=201,
        refused=(400, 413),
        body=JoinTokenRequestSerializer,
        sent={"lifetime_seconds": 3600, "uses": 1, "note": "rack 4"},
    )
    def post(self, request: Request) -> Response:
        """Creates a join token.

        New nodes use it in place of the registration token until it expires or is used up.
        """
        body = validate_body(JoinTokenRequestSerializer, request)
        configured = conf.cluster().public_url
        url = configured or _base_url(body.get("url") or request.build_absolute_uri("/"))
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        now = clock.now()
        token, plain = joining.make(
            actor=actor_of(request),
            now=now,
            note=body.get("note", ""),
            lifetime=body.get("lifetime_seconds", joining.DEFAULT_LIFETIME),
            uses=body.get("uses", 1),
        )
        shown = CREATED_TOKEN_SHAPE.of_object(
            token,
            state=joining.state(token, now).value,
            token=plain,
            command=join_script.join_command(url, plain, wheel),
            url=url,
            url_is_set=bool(configured),
            warnings=join_script.join_warnings(url, host=conf.cluster().host, wheel=wheel),
        )
        return Response(shown, status=201, headers={"Cache-Control": "private, no-store"})


def _base_url(text: str) -> str:
    try:
        return addresses.parse_base_url(text)
    except ValueError as error:
        raise errors.InvalidInput(f"url is {error}", field="url") from error


class JoinTokenView(NodeView):
    """`/api/join-tokens/:id`."""

    @describe(
        "join_tokens_revoke",
        "Revoke a join token",
        rest.MessageSerializer,
        refused=(404,),
        shown={"message": "join token revoked"},
    )
    def delete(self, request: Request, token_id: str) -> Response:
        """Revokes the token: it admits no new node. Nodes that registered with it stay."""
        joining.revoke(parse_id(token_id, "join token"), actor=actor_of(request), now=clock.now())
        return Response({"message": "join token revoked"})


SCRIPT_MEDIA_TYPE, WHEEL_MEDIA_TYPE = "text/x-shellscript", "application/zip"


class JoinAuthentication(BaseAuthentication):
    """Authenticates machines by a registration or join token, and counts wrong tokens.

    It ignores other credentials, so that the authentication of users can check them.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the joining machine; None if the credential is a user's.

        Raises the errors for 401 (wrong token) and 429 (too many wrong tokens).
        """
        offered = principals.bearer(request.headers.get("authorization", ""))
        if not offered:
            return None
        throttle.token_failures().check(authentication.client_address(request), clock.now())
        try:
            return self._authenticate_machine(request, offered)
        except identity.WrongCredential:
            throttle.token_failures().note(authentication.client_address(request), clock.now())
            raise

    @staticmethod
    def _authenticate_machine(request: Request, offered: str) -> tuple[Any, None] | None:
        if joining.is_join_token(offered):
            joining.recognise(offered, "", clock.now())
            return principals.JOINING, None
        if principals.is_registration_token(offered):
            return principals.JOINING, None
        if authentication.person_of(request).is_authenticated:
            return None
        raise identity.WrongCredential("invalid registration token")

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge that makes DRF respond 401, not 403."""
        return authentication.BEARER_CHALLENGE


class MayJoinPermission(BasePermission):
    """Permission for joining machines and admins."""

    message = "admin access required"

    def has_permission(self, request: Request, view: "APIView") -> bool:
        caller = authentication.principal(request)
        return caller.kind == "joining" or caller.is_admin


class JoinView(NodeView):
    """Base of the views for the join script and the worker package."""

    authentication_classes = [
        JoinAuthentication,
        authentication.BearerAuthentication,
        authentication.CookieAuthentication,
    ]
    permission_classes = [MayJoinPermission]
    tag = "worker"


class ScriptView(JoinView):
    """`/join`."""

    @describe(
        "join",
        "Get the script that adds a machine",
        others={(200, SCRIPT_MEDIA_TYPE): OpenApiTypes.STR},
        refused=(429,),
    )
    def get(self, request: Request) -> HttpResponse:
        """Returns a POSIX shell script that installs and starts the worker; it contains no secret.

        If the server has no worker package, the script prints this and stops.
        """
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        return _forbid_caching(
            HttpResponse(
                join_script.join_script_for(wheel), content_type=f"{SCRIPT_MEDIA_TYPE}; charset=utf-8"
            )
        )


class WheelView(JoinView):
    """`/join/wheel`."""

    @describe(
        "join_wheel",
        "Get the worker package",
        others={(200, WHEEL_MEDIA_TYPE): OpenApiTypes.BINARY},
        refused=(429,),
    )
    def get(self, request: Request) -> HttpResponse:
        """Returns the worker's Python package (a wheel) that the script installs.

        503 if the server has none.
        """
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        try:
            content = wheel.path.read_bytes() if wheel else None
        except OSError:
            content = None  # replaced or removed in this moment
        if wheel is None or content is None:
            raise errors.Unavailable(join_script.NO_WHEEL_ERROR)
        answer = HttpResponse(content, content_type=WHEEL_MEDIA_TYPE)
        answer["Content-Disposition"] = f'attachment; filename="{wheel.path.name}"'
        return _forbid_caching(answer)


def _forbid_caching(answer: HttpResponse) -> HttpResponse:
    answer["Cache-Control"] = "private, no-store"
    return answer
