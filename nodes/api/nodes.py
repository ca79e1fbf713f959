"""The list of nodes and one node (`contract/http-api.md` §2.1, §2.3, §2.4)."""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import errors
from localai_cluster.web.openapi import refusals
from localai_cluster.web.renderers import FastJSONRenderer
from nodes.api.base import (
    FINGERPRINT,
    MOMENT,
    NODE_ID,
    NodeView,
    Schema,
    answered,
    one_of,
    page_schema,
    query,
    text,
)
from nodes.api.node_actions import act, described_action
from nodes.api.worker_auth import parse_node_id
from nodes.models import NodeStatus, NodeType, selectors
from nodes.registry import actions, listing, node_rows
from nodes.registry.shape import NODE, NODE_DETAIL

_PAIR: Schema = {
    "type": "string",
    "pattern": rf"^[^=]{{1,{selectors.LONGEST_KEY}}}=[\s\S]{{0,{selectors.LONGEST_VALUE}}}$",
}
_FILTERS = [
    query("status", one_of(NodeStatus.values), "Only nodes of this status."),
    query("type", one_of(NodeType.values), "Only nodes of this type."),
    query("vendor", text(listing.LONGEST_VENDOR), "Only nodes with GPUs of this vendor."),
    query(
        "search",
        text(listing.LONGEST_SEARCH),
        "Only nodes with this in name, address or GPUs.",
    ),
    query(
        "label",
        {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": listing.MOST_LABELS},
        "`key=value`: only nodes with this label; repeated, with all of them.",
        explode=True,
    ),
    query("sort", one_of(listing.ORDERS) | {"default": "name"}, "The order; `-` turns it round."),
]
_LABELS = {"gpu.vendor": "nvidia", "gpu.vram": "16GB", "node.name": "gpu-a", "node.replica-slots": "2"}
_LISTED = {
    "id": NODE_ID,
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
    "last_heartbeat": MOMENT,
    "created_at": "2026-07-01T08:00:00Z",
    "updated_at": MOMENT,
    "model_count": 1,
    "in_flight_count": 2,
    "labels": _LABELS,
}
_BEHIND = {
    "gpus": [
        {
            "index": 0,
            "uuid": "GPU-5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11",
            "name": "NVIDIA L4",
            "total_vram": 25757220864,
            "free_vram": 20000000000,
            "reserved_vram": 0,
            "utilization": 12,
        }
    ],
    "approval": {"at": "2026-07-01T08:01:00Z", "by": "ann", "reason": ""},
    "drain": {
        "since": MOMENT,
        "by": "ann",
        "reason": "new power supply",
        "own": False,
        "in_flight": 2,
        "replicas": 1,
        "deadline": "2026-08-22T09:25:04.120394Z",
    },
    "identity": {
        "weak": False,
        "fingerprint": FINGERPRINT,
        "source_address": "10.1.0.4",
        "first_seen": "2026-07-01T08:00:00Z",
        "bound_at": "2026-07-01T08:00:00Z",
        "instance": "5f0c1f8d6f3b4f0bb7b0d7f3c8a1e2d4",
        "open_conflicts": 0,
    },
    "revision": 7,
    "overrides": {
        "max_replicas_per_model": {"by": "ann", "at": MOMENT},
        "vram_budget": {"by": "", "at": None},
    },
    "label_sources": dict.fromkeys(_LABELS, "auto"),
    "inventory": {"at": MOMENT, "error": ""},
}


class NodesView(NodeView):
    """`/api/nodes` (R1.61)."""

    renderer_classes = [FastJSONRenderer]

    @page_schema(
        "nodes_list",
        "List nodes",
        tag="nodes",
        rows=NODE.many,
        example=answered([_LISTED]),
        filters=_FILTERS,
    )
    def get(self, request: Request) -> Response:
        """All nodes by name, or those that match the parameters."""
        wanted = listing.wanted_nodes(request.query_params)
        whole = wanted.page.whole and not wanted.filtered
        rows = node_rows.elements(wanted.nodes[wanted.page.part], whole=whole)
        total = len(rows) if wanted.page.whole else wanted.nodes.count()
        return Response(rows, headers=wanted.page.headers(request, total))


class NodeDetailView(NodeView):
    """`/api/nodes/:id`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_read",
        summary="Show a node",
        tags=["nodes"],
        responses={200: NODE_DETAIL.ref, **refusals(401, 403, 404)},
        examples=[answered(_LISTED | _BEHIND)],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """A node as in the list, with the facts behind its status."""
        found = parse_node_id(node_id)
        node = None if found is None else node_rows.detail(found)
        if node is None:
            raise errors.NotFound("node not found")
        return Response(node)

    @described_action(actions.REMOVE, None, (401, 403, 404), operation_id="nodes_delete")
    def delete(self, request: Request, node_id: str) -> Response:
        """Removes the record with its replicas, labels and conflicts; the timeline stays (R1.21)."""
        return act(request, node_id, actions.REMOVE)
