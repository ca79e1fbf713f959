"""A node's timeline, newest first; it outlives the node."""

from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import errors
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import FastJSONRenderer
from localai_cluster.web.shapes import Row, Shape, field
from nodes.api.base import MOMENT, NODE_ID, NodeView, answered, one_of, query, whole
from nodes.api.worker_auth import parse_node_id
from nodes.models import BackendNode, NodeEvent
from nodes.registry import listing
from nodes.registry.heartbeats import LARGEST
from nodes.registry.shape import EVENT

USUAL_PAGE, MOST_A_PAGE = 50, 500
EVENTS = Shape(
    "Events",
    "A page of the timeline, newest first; `next_cursor` leads to the older ones, if there are any.",
    [field("events", EVENT.many), field("next_cursor", {"type": "integer"}, optional=True)],
)
_EXAMPLE = {
    "id": 4711,
    "node_id": NODE_ID,
    "node_name": "gpu-a",
    "kind": "drained",
    "at": MOMENT,
    "last_at": MOMENT,
    "count": 1,
    "actor_kind": "user",
    "actor": "ann",
    "cause": "new power supply",
    "status_before": "healthy",
    "status_after": "draining",
    "detail": {"deadline_seconds": 600},
}


class EventsView(NodeView):
    """`/api/nodes/:id/events`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_events",
        summary="Show a node's timeline",
        tags=["nodes"],
        parameters=[
            query("limit", whole(1, MOST_A_PAGE, USUAL_PAGE), "How many at most."),
            query("cursor", whole(1, LARGEST), "`next_cursor` of the page before: only older events."),
            query("kind", one_of(NodeEvent.Kind.values), "Only events of this kind."),
        ],
        responses={200: EVENTS.ref, **refusals(400, 401, 403, 404)},
        examples=[answered({"events": [_EXAMPLE], "next_cursor": 4711})],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Events of a node, also of a removed one, within the retention period."""
        node = _known(node_id)
        given = listing.Parameters(request.query_params, "limit", "cursor", "kind")
        limit = given.number("limit", 1, MOST_A_PAGE) or USUAL_PAGE
        rows = NodeEvent.objects.filter(node_id=node).order_by("-id")
        if kind := given.choice("kind", NodeEvent.Kind.values):
            rows = rows.filter(kind=kind)
        if cursor := given.number("cursor", 1, LARGEST):
            rows = rows.filter(id__lt=cursor)
        return Response(_page(EVENT.rows(rows[: limit + 1]), limit))


def _known(text: str) -> UUID:
    """The id of a node that exists or has left events behind; raises NotFound."""
    node = parse_node_id(text)
    if node is None or not (
        BackendNode.objects.filter(pk=node).exists() or NodeEvent.objects.filter(node_id=node).exists()
    ):
        raise errors.NotFound("node not found")
    return node


def _page(rows: list[Row], limit: int) -> Row:
    """At most `limit` of the rows, and where the older ones begin if there is one more."""
    shown = rows[:limit]
    return EVENTS.of(events=shown, next_cursor=shown[-1]["id"] if len(rows) > limit else None)
