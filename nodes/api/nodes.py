"""Nodes: the list, one node, its replicas, timeline and identity conflicts.

Rules: `contract/http-api.md` §2.1, §2.3, §2.4. In a conflict another machine claims to be a node; an
administrator accepts or refuses the claim.
"""

from functools import partial
from uuid import UUID

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import describe
from localai_cluster.web.shapes import Row, Shape, field
from nodes.api import base
from nodes.api.node_actions import describe_action, perform_action
from nodes.api.worker_routes import parse_id
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeModel, NodeStatus, NodeType, scheduling
from nodes.registry import actions, claims, listing, node_rows
from nodes.registry.claims import CONFLICT_SHAPE
from nodes.registry.heartbeats import MAX_FIGURE
from nodes.registry.shape import NODE_DETAIL_SHAPE, NODE_SHAPE
from nodes.registry.timeline import EVENT_SHAPE
from nodes.replicas.shape import REPLICA

_LABEL_SCHEMA: base.Schema = {
    "type": "string",
    "pattern": rf"^[^=]{{1,{scheduling.MAX_KEY_LENGTH}}}=[\s\S]{{0,{scheduling.MAX_VALUE_LENGTH}}}$",
}
_FILTER_PARAMETERS = [
    base.query_parameter("status", base.enum_schema(NodeStatus.values), "Only nodes of this status."),
    base.query_parameter("type", base.enum_schema(NodeType.values), "Only nodes of this type."),
    base.query_parameter(
        "vendor", base.text_schema(listing.MAX_VENDOR_LENGTH), "Only nodes with GPUs of this vendor."
    ),
    base.query_parameter(
        "search",
        base.text_schema(listing.MAX_SEARCH_LENGTH),
        "Only nodes with this in name, address or GPUs.",
    ),
    base.query_parameter(
        "label",
        {"type": "array", "items": _LABEL_SCHEMA, "minItems": 1, "maxItems": listing.MAX_LABELS},
        "`key=value`: only nodes with this label; repeated, with all of them.",
        explode=True,
    ),
    base.query_parameter(
        "sort", base.enum_schema(listing.SORT_ORDERS) | {"default": "name"}, "The order; `-` turns it round."
    ),
]


class NodesView(base.NodeView):
    """`/api/nodes` (R1.61)."""

    @describe(
        "nodes_list",
        "List nodes",
        NODE_SHAPE.many,
        refused=(400,),
        parameters=[*_FILTER_PARAMETERS, *base.PAGE],
    )
    def get(self, request: Request) -> Response:
        """Returns all nodes by name, or those that match the parameters."""
        node_query = listing.parse_node_query(request.query_params)
        is_whole = node_query.page.whole and not node_query.filtered
        rows = node_rows.list_json(node_query.nodes[node_query.page.part], whole=is_whole)
        total = len(rows) if node_query.page.whole else node_query.nodes.count()
        return Response(rows, headers=node_query.page.headers(request, total))


class NodeDetailView(base.NodeView):
    """`/api/nodes/:id`."""

    @describe("nodes_read", "Show a node", NODE_DETAIL_SHAPE, refused=(404,))
    def get(self, request: Request, node_id: str) -> Response:
        """Returns a node as in the list, with the facts from which its status follows."""
        node = node_rows.detail_row(parse_id(node_id))
        if node is None:
            raise errors.NotFound("node not found")
        return Response(node)

    @describe_action(actions.REMOVE, refused=(404,), operation_id="nodes_delete")
    def delete(self, request: Request, node_id: str) -> Response:
        """Removes the node with its replicas, labels and conflicts; its timeline stays (R1.21)."""
        return perform_action(request, node_id, actions.REMOVE)


class NodeReplicasView(base.NodeView):
    """`/api/nodes/:id/models`."""

    @describe("nodes_models", "List a node's replicas", REPLICA.many, refused=(404,))
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the node's replicas in every state."""
        return Response(replica_rows(base.require_node_id(node_id)))


class ReplicasView(base.NodeView):
    """`/api/nodes/models` (R1.61)."""

    @describe("models_list", "List loaded replicas", REPLICA.many)
    def get(self, request: Request) -> Response:
        """Returns the loaded replicas on healthy nodes."""
        return Response(
            REPLICA.rows(NodeModel.objects.serving().order_by("model_name", "node_id", "replica_index"))
        )


def replica_rows(node: UUID) -> list[Row]:
    return REPLICA.rows(NodeModel.objects.filter(node_id=node).order_by("model_name", "replica_index"))


DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 500
EVENTS_SHAPE = Shape(
    "Events",
    "A page of the timeline, newest first; `next_cursor` leads to the older ones, if there are any.",
    [
        field("events", EVENT_SHAPE.many),
        field("next_cursor", {"type": "integer"}, example=4711, optional=True),
    ],
)
_EVENT_PAGE = [
    base.query_parameter(
        "limit", base.integer_schema(1, MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE), "How many at most."
    ),
    base.query_parameter(
        "cursor", base.integer_schema(1, MAX_FIGURE), "`next_cursor` of the page before: only older events."
    ),
    base.query_parameter("kind", base.enum_schema(NodeEvent.Kind.values), "Only events of this kind."),
]


class EventsView(base.NodeView):
    """`/api/nodes/:id/events`."""

    @describe(
        "nodes_events", "Show a node's timeline", EVENTS_SHAPE, refused=(400, 404), parameters=_EVENT_PAGE
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the events of a node within the retention period, also after its removal."""
        node = _known_node_id(node_id)
        query = base.read_query(request, _EVENT_PAGE)
        limit = query["limit"]
        rows = NodeEvent.objects.filter(node_id=node).order_by("-id")
        if query["kind"]:
            rows = rows.filter(kind=query["kind"])
        if query["cursor"]:
            rows = rows.filter(id__lt=query["cursor"])
        events = EVENT_SHAPE.rows(rows[: limit + 1])
        cursor = events[limit - 1]["id"] if len(events) > limit else None
        return Response(EVENTS_SHAPE.of(events=events[:limit], next_cursor=cursor))


def _known_node_id(id_text: str) -> UUID:
    """Return the id if it belongs to a node, or to a removed node that has events. Raise NotFound."""
    node = parse_id(id_text)
    if not (BackendNode.objects.filter(pk=node).exists() or NodeEvent.objects.filter(node_id=node).exists()):
        raise errors.NotFound("node not found")
    return node


_CONFLICTS_PER_PAGE = 100
_describe_conflicts = partial(describe, answer=CONFLICT_SHAPE.many, parameters=base.PAGE, tag="identity")


class ConflictsView(base.NodeView):
    """`/api/nodes/conflicts`."""

    @_describe_conflicts("conflicts_list", "List open identity conflicts", refused=(400,))
    def get(self, request: Request) -> Response:
        """Returns the identity conflicts of all nodes that await a decision, latest first."""
        return conflicts_page(request, NodeConflict.objects.filter(state="open"))


class NodeConflictsView(base.NodeView):
    """`/api/nodes/:id/conflicts`."""

    @_describe_conflicts("nodes_conflicts", "List a node's identity conflicts", refused=(400, 404))
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the claims of other machines to be this node, open and resolved, latest first."""
        return conflicts_page(request, NodeConflict.objects.filter(node=base.require_node_id(node_id)))


def conflicts_page(request: Request, conflicts: QuerySet[NodeConflict]) -> Response:
    page = listing.parse_page(
        listing.Parameters(request.query_params, "limit", "offset"), _CONFLICTS_PER_PAGE
    )
    rows = CONFLICT_SHAPE.rows(conflicts.order_by("-last_at", "id")[page.part])
    return Response(rows, headers=page.headers(request, conflicts.count()))


class AcceptView(base.NodeView):
    """`/api/nodes/:id/conflicts/:cid/accept`."""

    @describe_action(actions.ACCEPT, refused=(404, 409), operation_id="conflicts_accept", tag="identity")
    def post(self, request: Request, node_id: str, conflict_id: str) -> Response:
        """Gives the node to the claimant; the previous secret of the node is rejected for good."""
        node, conflict = _parse_ids(node_id, conflict_id)
        claims.accept_conflict(conflict, node_id=node, actor=base.actor_of(request), now=clock.now())
        return Response({"message": actions.ACCEPT.message})


class RefuseView(base.NodeView):
    """`/api/nodes/:id/conflicts/:cid/refuse`."""

    @describe_action(actions.REFUSE, refused=(404, 409), operation_id="conflicts_refuse", tag="identity")
    def post(self, request: Request, node_id: str, conflict_id: str) -> Response:
        """Keeps the node's identity; the claimant stays refused."""
        node, conflict = _parse_ids(node_id, conflict_id)
        claims.refuse_conflict(conflict, node_id=node, actor=base.actor_of(request), now=clock.now())
        return Response({"message": actions.REFUSE.message})


def _parse_ids(node_id: str, conflict_id: str) -> tuple[UUID, UUID]:
    return base.require_node_id(node_id), parse_id(conflict_id, "conflict")
