"""Join tokens: list, make, revoke. The token leaves once, in the answer that made it."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import join_script
from localai_cluster.kit import clock, conf, env, errors
from localai_cluster.web import rest
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import Described, NullIsAbsent, Text, Whole, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, TIME, Named, Row, Shape, count, field
from localai_cluster.web.shapes import UUID as UUID_FORMAT
from nodes.api.base import MOMENT, NodeView, actor_of, answered, message, page_schema, sent
from nodes.api.worker_auth import parse_node_id
from nodes.models import JoinToken
from nodes.registry import joining, listing

USUAL_PAGE = 100
JOIN_TOKEN_STATE = Named(
    "JoinTokenState", {"type": "string", "enum": [one.value for one in joining.TokenState]}
)
_FIELDS = [
    field("id", UUID_FORMAT),
    field("state", JOIN_TOKEN_STATE.ref),
    field("note", TEXT),
    field("created_at", TIME),
    field("created_by", TEXT),
    field("expires_at", TIME),
    field("max_uses", count(1), "How many new nodes it admits."),
    field("uses", count(), "How many it has admitted."),
    field("revoked_at", TIME, optional=True),
    field("revoked_by", TEXT, optional=True),
    field("last_used_at", TIME, optional=True),
    field("last_used_by", TEXT, "Name of the node that joined last.", optional=True),
]
JOIN_TOKEN = Shape("JoinToken", "A join token, without the token.", _FIELDS)
MADE = Shape(
    "MadeJoinToken",
    "A new join token. `token` and `command` are shown this once.",
    [
        *_FIELDS,
        field("token", {"type": "string", "pattern": "^join-[0-9a-f]{64}$"}),
        field("command", TEXT, "The line to run on the other machine; it contains the token."),
        field("url", TEXT, "The server's URL in that line."),
        field("url_is_set", FLAG, "Whether the URL is CLUSTER_PUBLIC_URL and not what this request used."),
        field(
            "warnings",
            TEXTS,
            "Why the line may not work on another machine, and what it risks.",
        ),
    ],
)
COMPONENTS = (JOIN_TOKEN_STATE, JOIN_TOKEN, MADE)
_EXAMPLE = {
    "id": "0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44",
    "state": "usable",
    "note": "rack 4",
    "created_at": MOMENT,
    "created_by": "ann",
    "expires_at": "2026-08-22T10:15:04.120394Z",
    "max_uses": 1,
    "uses": 0,
}
_TOKEN = "join-" + "0" * 64
_URL = "http://192.0.2.10:8080"


class JoinTokenRequestSerializer(Described, NullIsAbsent):
    """For how long, for how many nodes, and what for."""

    lifetime_seconds = Whole(
        required=False, allow_null=True, min_value=joining.SHORTEST, max_value=joining.LONGEST
    )
    uses = Whole(required=False, allow_null=True, min_value=1, max_value=joining.MOST_USES)
    note = Text(required=False, allow_null=True, max_length=joining.LONGEST_NOTE)
    url = Text(required=False, allow_null=True, max_length=env.LONGEST_URL)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the defaults."""
        properties = schema["properties"]
        properties["lifetime_seconds"]["default"] = joining.USUAL
        properties["uses"]["default"] = 1
        properties["url"]["description"] = "Base URL for the command if CLUSTER_PUBLIC_URL is not set."
        return schema


def rows(tokens: Iterable[JoinToken], now: datetime) -> list[Row]:
    """The tokens as they are shown; no query."""
    return [JOIN_TOKEN.of(**_facts(one, now)) for one in tokens]


def _facts(token: JoinToken, now: datetime) -> Row:
    own = {name: getattr(token, name) for name in JOIN_TOKEN.fields if name != "state"}
    return own | {"state": joining.state(token, now).value}


class JoinTokensView(NodeView):
    """`/api/join-tokens`."""

    @page_schema(
        "join_tokens",
        "List join tokens",
        tag="nodes",
        rows=JOIN_TOKEN.many,
        example=answered([_EXAMPLE]),
    )
    def get(self, request: Request) -> Response:
        """Newest first; never the tokens themselves. Expired ones stay for the event retention."""
        page = listing.page_of(listing.Parameters(request.query_params, "limit", "offset"), USUAL_PAGE)
        tokens = JoinToken.objects.all()
        found = rows(tokens[page.part], clock.now())
        return Response(found, headers=page.headers(request, tokens.count()))

    @extend_schema(
        operation_id="join_tokens_make",
        summary="Make a join token",
        tags=["nodes"],
        request=JoinTokenRequestSerializer,
        responses={201: MADE.ref, **refusals(400, 401, 403, 413)},
        examples=[
            sent({"lifetime_seconds": 3600, "uses": 1, "note": "rack 4"}),
            answered(
                _EXAMPLE
                | {
                    "token": _TOKEN,
                    "command": join_script.command(_URL, _TOKEN),
                    "url": _URL,
                    "url_is_set": True,
                    "warnings": [],
                },
                status="201",
            ),
        ],
    )
    def post(self, request: Request) -> Response:
        """Works in place of the registration token, for new nodes until it expires or is used up."""
        told = validate_body(JoinTokenRequestSerializer, request)
        configured = conf.cluster().public_url
        url = configured or _base_url(told.get("url") or request.build_absolute_uri("/"))
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        now = clock.now()
        token, plain = joining.make(
            actor=actor_of(request),
            now=now,
            note=told.get("note", ""),
            lifetime=told.get("lifetime_seconds", joining.USUAL),
            uses=told.get("uses", 1),
        )
        shown = MADE.of(
            **_facts(token, now),
            token=plain,
            command=join_script.command(url, plain, wheel),
            url=url,
            url_is_set=bool(configured),
            warnings=join_script.warnings(url, host=conf.cluster().host, wheel=wheel),
        )
        return Response(shown, status=201, headers={"Cache-Control": "private, no-store"})


def _base_url(text: str) -> str:
    try:
        return env.parse_base_url(text)
    except ValueError as error:
        raise errors.InvalidInput(f"url is {error}", field="url") from error


class JoinTokenView(NodeView):
    """`/api/join-tokens/:id`."""

    @extend_schema(
        operation_id="join_tokens_revoke",
        summary="Revoke a join token",
        tags=["nodes"],
        responses={200: rest.MessageSerializer, **refusals(401, 403, 404)},
        examples=[message("join token revoked")],
    )
    def delete(self, request: Request, token_id: str) -> Response:
        """It admits no new node any more. Nodes that joined with it stay."""
        joining.revoke(_token_id(token_id), actor=actor_of(request), now=clock.now())
        return Response({"message": "join token revoked"})


def _token_id(text: str) -> UUID:
    found = parse_node_id(text)
    if found is None:
        raise errors.NotFound("join token not found")
    return found
