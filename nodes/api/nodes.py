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
from nodes.registry.heartbeats import MAX_FIGURE
from nodes.registry.shape import CONFLICT_SHAPE, EVENT_SHAPE, NODE_DETAIL_SHAPE, NODE_SHAPE
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
_LABELS_EXAMPLE = {
    "gpu.vendor": "nvidia",
    "gpu.vram": "16GB",
    "node.name": "gpu-a",
    "node.replica-slots": "2",
}
_NODE_EXAMPLE = {
    "id": base.NODE_ID,
    "name": "gpu-a",
    "node_type": "backend",
    "address": "10.1.0.4:50051",
    "http_address": "10.1.0.4:50050",
    "status": "draining",
    "total_vram": 25757220864,
    "available_vram": 20000000000,
    "reserved_vram": 0,
    "total_ram": 67108864000,
    "available_ram": 50000000000,
    "total_disk": 500000000000,
    "available_disk": 320000000000,
    "gpu_vendor": "nvidia",
    "gpu_compute_capability": "8.9",
    "capability": "nvidia-cuda-12",
    "max_replicas_per_model": 2,
    "max_replicas_per_model_manually_set": True,
    "vram_budget": "80%",
    "vram_budget_bytes": 20605776691,
    "vram_budget_manually_set": True,
    "last_heartbeat": base.MOMENT,
    "created_at": "2026-07-01T08:00:00Z",
    "updated_at": base.MOMENT,
    "model_count": 1,
    "in_flight_count": 2,
    "labels": _LABELS_EXAMPLE,
}
_DETAIL_EXAMPLE = {
    "gpus": [
        {
            "index": 0,
            "uuid": "GPU-5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11",
            "name": "NVIDIA L4",
            "total_vram": 25757220864,
            "free_vram": 20000000000,
            "reserved_vram": 0,
            "utilization": 12,
            "temperature": 48,
            "power": 33,
            "power_limit": 72,
            "ecc_errors": 0,
            "driver": "550.54.15, CUDA 12.4",
        }
    ],
    "system": {
        "os": "Debian GNU/Linux 12 (bookworm)",
        "kernel": "6.1.0-18-amd64",
        "cpu": "AMD EPYC 7443P 24-Core Processor",
        "cpu_count": 48,
        "cpu_cores": 24,
        "booted_at": "2026-08-01T06:00:00+00:00",
    },
    "approval": {"at": "2026-07-01T08:01:00Z", "by": "ann", "reason": ""},
    "drain": {
        "since": base.MOMENT,
        "by": "ann",
        "reason": "new power supply",
        "own": False,
        "in_flight": 2,
        "replicas": 1,
        "deadline": "2026-08-22T09:25:04.120394Z",
    },
    "identity": {
        "weak": False,
        "fingerprint": base.EXAMPLE_FINGERPRINT,
        "source_address": "10.1.0.4",
        "first_seen": "2026-07-01T08:00:00Z",
        "bound_at": "2026-07-01T08:00:00Z",
        "instance": "5f0c1f8d6f3b4f0bb7b0d7f3c8a1e2d4",
        "open_conflicts": 0,
    },
    "model_bytes": 43165671424,
    "revision": 7,
    "overrides": {
        "max_replicas_per_model": {"by": "ann", "at": base.MOMENT},
        "vram_budget": {"by": "", "at": None},
    },
    "label_sources": dict.fromkeys(_LABELS_EXAMPLE, "auto"),
    "inventory": {"at": base.MOMENT, "error": ""},
}


class NodesView(base.NodeView):
    """`/api/nodes` (R1.61)."""

    @describe(
        "nodes_list",
        "List nodes",
        NODE_SHAPE.many,
        refused=(400,),
        parameters=[*_FILTER_PARAMETERS, *base.PAGE],
        shown=[_NODE_EXAMPLE],
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

    @describe(
        "nodes_read", "Show a node", NODE_DETAIL_SHAPE, refused=(404,), shown=_NODE_EXAMPLE | _DETAIL_EXAMPLE
    )
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


_REPLICAS_EXAMPLE = [
    {
        "id": "7d3c3a52-0c54-4a8e-8f52-5a6d1c1de0aa",
        "node_id": base.NODE_ID,
        "model_name": "minilm",
        "replica_index": 0,
        "address": "10.1.0.4:50052",
        "state": "loaded",
        "in_flight": 2,
        "last_used": base.MOMENT,
        "backend_type": "minilm",
        "config_revision": "3b1f6a6f6c0b",
        "effective_options_hash": "a94a8fe5ccb1",
        "created_at": base.MOMENT,
        "updated_at": base.MOMENT,
    }
]


class NodeReplicasView(base.NodeView):
    """`/api/nodes/:id/models`."""

    @describe("nodes_models", "List a node's replicas", REPLICA.many, refused=(404,), shown=_REPLICAS_EXAMPLE)
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the node's replicas in every state."""
        return Response(replica_rows(base.require_node_id(node_id)))


class ReplicasView(base.NodeView):
    """`/api/nodes/models` (R1.61)."""

    @describe("models_list", "List loaded replicas", REPLICA.many, shown=_REPLICAS_EXAMPLE)
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
    [field("events", EVENT_SHAPE.many), field("next_cursor", {"type": "integer"}, optional=True)],
)
_EVENT_EXAMPLE = {
    "id": 4711,
    "node_id": base.NODE_ID,
    "node_name": "gpu-a",
    "kind": "drained",
    "at": base.MOMENT,
    "last_at": base.MOMENT,
    "count": 1,
    "actor_kind": "user",
    "actor": "ann",
    "cause": "new power supply",
    "status_before": "healthy",
    "status_after": "draining",
    "detail": {"deadline_seconds": 600},
}


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
        "nodes_events",
        "Show a node's timeline",
        EVENTS_SHAPE,
        refused=(400, 404),
        parameters=_EVENT_PAGE,
        shown={"events": [_EVENT_EXAMPLE], "next_cursor": 4711},
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
_CONFLICT_EXAMPLE = [
    {
        "id": "0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44",
        "node_id": base.NODE_ID,
        "node_name": "gpu-a",
        "kind": "secret",
        "state": "open",
        "fingerprint": base.EXAMPLE_FINGERPRINT,
        "source_address": "10.1.0.9",
        "advertised_address": "10.1.0.9:50051",
        "node_source_address": "10.1.0.4",
        "count": 3,
        "first_at": base.MOMENT,
        "last_at": base.MOMENT,
    }
]
_describe_conflicts = partial(
    describe, answer=CONFLICT_SHAPE.many, parameters=base.PAGE, shown=_CONFLICT_EXAMPLE, tag="identity"
)


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
