"""A node's timeline, newest first; it outlives the node."""

from typing import Any
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import errors
from localai_cluster.web.openapi import refusals
from localai_cluster.web.renderers import FastJSONRenderer
from nodes.api import admin_shapes, examples
from nodes.api.parameters import EVENT_PARAMETERS
from nodes.api.views import NodeView
from nodes.api.worker_auth import parse_node_id
from nodes.models import BackendNode, NodeEvent
from nodes.registry import listing
from nodes.registry.heartbeats import LARGEST

USUAL_PAGE, MOST_A_PAGE = 50, 500
_SHOWN = (
    "id",
    "node_id",
    "node_name",
    "kind",
    "at",
    "last_at",
    "count",
    "actor_kind",
    "actor",
    "cause",
    "status_before",
    "status_after",
    "detail",
    "request_id",
)


class EventsView(NodeView):
    """`/api/nodes/:id/events`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_events",
        tags=["nodes"],
        parameters=EVENT_PARAMETERS,
        responses={200: admin_shapes.EventsSerializer, **refusals(400, 401, 403, 404)},
        examples=[examples.EVENTS],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """What happened to a node, also to one that was removed, for as long as events are kept."""
        node = known(node_id)
        given = listing.Parameters(request.query_params, "limit", "cursor", "kind")
        limit = given.number("limit", 1, MOST_A_PAGE) or USUAL_PAGE
        rows = NodeEvent.objects.filter(node_id=node).order_by("-id")
        if kind := given.choice("kind", NodeEvent.Kind.values):
            rows = rows.filter(kind=kind)
        if cursor := given.number("cursor", 1, LARGEST):
            rows = rows.filter(id__lt=cursor)
        return Response(page(list(rows.values(*_SHOWN)[: limit + 1]), limit))


def known(text: str) -> UUID:
    """The id of a node that exists or has left events behind; raises NotFound."""
    node = parse_node_id(text)
    if node is None or not (
        BackendNode.objects.filter(pk=node).exists() or NodeEvent.objects.filter(node_id=node).exists()
    ):
        raise errors.NotFound("node not found")
    return node


def page(rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """At most `limit` of the rows, and where the older ones begin if there is one more."""
    shown = [
        {name: value for name, value in row.items() if value or name not in ("detail", "request_id")}
        for row in rows[:limit]
    ]
    return {"events": shown} | ({"next_cursor": shown[-1]["id"]} if len(rows) > limit else {})
