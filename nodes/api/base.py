"""Helpers of the routes for admins: error envelope, node ids, actor, and shared parts of the API document."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.views import APIView

from localai_cluster.accounts.actors import Actor, of_principal
from localai_cluster.accounts.authentication import principal
from localai_cluster.kit import clock, errors
from localai_cluster.web import shapes
from localai_cluster.web.envelopes import FlatView
from nodes.api.worker_routes import parse_id
from nodes.backends import node_commands
from nodes.models import BackendNode
from nodes.registry import listing

Schema = dict[str, Any]
MAX_REVISION = 2**31 - 1
JOB_ID, NODE_ID, MOMENT = shapes.EXAMPLE_JOB_ID, shapes.EXAMPLE_NODE_ID, shapes.EXAMPLE_TIME
FINGERPRINT = shapes.EXAMPLE_FINGERPRINT


class NodeView(APIView):
    """Base of the views whose error bodies have the type `node_error`."""

    error_type = "node_error"
    tag = "nodes"


class ModelRoute(FlatView):
    """Base of routes of models with flat errors."""

    tag = "models"


class BackendRoute(FlatView):
    """Base of routes of backends with flat errors."""

    tag = "backends"


def require_node_id(id_text: str) -> UUID:
    """Return the id of an existing node; raise NotFound."""
    return require_node(id_text).id


def require_node(id_text: str) -> BackendNode:
    """Return the node with this id; raise NotFound."""
    node = BackendNode.objects.filter(pk=parse_id(id_text)).first()
    if node is None:
        raise errors.NotFound("node not found")
    return node


def require_ready_node(id_text: str) -> BackendNode:
    """Return the node with this id if it takes commands on backends; raise NotFound or Conflict."""
    node = require_node(id_text)
    if reason := node_commands.refusal(node):
        raise errors.Conflict(reason)
    return node


MODEL_PATH = OpenApiParameter(
    "model", OpenApiTypes.STR, OpenApiParameter.PATH, description="The model's name; it may contain slashes."
)


def actor_of(request: Request) -> Actor:
    return of_principal(principal(request))


def parse_edit_arguments(request: Request) -> dict[str, Any]:
    """Parse the arguments of an edit: the actor, the time, and the node's revision that the actor has seen.

    The revision is None if the request contains none (UW35). Raises InvalidInput for an invalid revision.
    """
    revision = listing.Parameters(request.query_params, "revision").number("revision", 0, MAX_REVISION)
    return {"actor": actor_of(request), "now": clock.now(), "revision": revision}


def query_parameter(name: str, schema: Schema, meaning: str, **options: Any) -> OpenApiParameter:
    return OpenApiParameter(name, schema, OpenApiParameter.QUERY, description=meaning, **options)


def read_query(request: Request, parameters: Sequence[OpenApiParameter]) -> dict[str, Any]:
    """Return the query parameters, parsed by their schemas; an absent one has its default, or is empty.

    Raises InvalidInput with the name of a wrong or unknown one.
    """
    schemas = {entry.name: entry.type for entry in parameters if entry.location == OpenApiParameter.QUERY}
    query = listing.Parameters(request.query_params, *schemas)
    return {name: _parse_parameter(query, name, schema) for name, schema in schemas.items()}


def _parse_parameter(query: listing.Parameters, name: str, schema: Any) -> Any:
    match schema:
        case {"type": "integer", "minimum": least, "maximum": most}:
            number = query.number(name, least, most)
            return schema.get("default") if number is None else number
        case {"type": "integer", "enum": choices}:
            return query.number(name, min(choices), max(choices))
        case {"type": "boolean"}:
            return query.choice(name, ("true", "false")) == "true"
        case {"enum": choices}:
            return query.choice(name, choices)
        case {"format": "date-time"}:
            return query.moment(name)
    return query.text(name, schema.get("maxLength", listing.MAX_SEARCH_LENGTH))


def enum_schema(values: list[str] | tuple[str, ...]) -> Schema:
    return {"type": "string", "enum": list(values)}


def text_schema(longest: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def integer_schema(least: int, most: int, usual: int | None = None) -> Schema:
    schema: Schema = {"type": "integer", "minimum": least, "maximum": most}
    return schema if usual is None else schema | {"default": usual}


def response_header(name: str, kind: Any, meaning: str, **options: Any) -> OpenApiParameter:
    return OpenApiParameter(
        name, kind, OpenApiParameter.HEADER, description=meaning, response=[200], **options
    )


PAGE = [
    query_parameter("limit", integer_schema(1, listing.MAX_PAGE_SIZE), "How many at most."),
    query_parameter("offset", integer_schema(0, listing.FARTHEST), "How many to leave out at the beginning."),
    response_header("X-Total-Count", OpenApiTypes.INT, "How many there are on all pages.", required=True),
    response_header("Link", OpenApiTypes.STR, "The first, previous, next and last page (RFC 8288)."),
]
"""Parameters and headers of a list with pages."""
REVISION_PARAMETER = query_parameter(
    "revision",
    integer_schema(0, MAX_REVISION),
    "The node's revision that the caller has seen: 409 (field `revision`) if it has moved since.",
)


def job_example(message: str, route: str = "/api/backends/job", job: str = JOB_ID) -> dict[str, Any]:
    """Return an example of the body that `job_fields` builds for a new operation."""
    return {"jobID": job, "statusUrl": f"{route}/{job}", "message": message}
