"""The replicas of a node and of the fleet (`contract/http-api.md` §2.3)."""

from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import FastJSONRenderer
from localai_cluster.web.shapes import Row
from nodes.api.base import MOMENT, NODE_ID, NodeView, answered, existing
from nodes.models import NodeModel
from nodes.registry.shape import REPLICA

_EXAMPLE = answered(
    [
        {
            "id": "7d3c3a52-0c54-4a8e-8f52-5a6d1c1de0aa",
            "node_id": NODE_ID,
            "model_name": "minilm",
            "replica_index": 0,
            "address": "10.1.0.4:50052",
            "state": "loaded",
            "in_flight": 2,
            "last_used": MOMENT,
            "backend_type": "minilm",
            "config_revision": "3b1f6a6f6c0b",
            "effective_options_hash": "a94a8fe5ccb1",
            "created_at": MOMENT,
            "updated_at": MOMENT,
        }
    ]
)


class NodeReplicasView(NodeView):
    """`/api/nodes/:id/models`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_models",
        summary="List a node's replicas",
        tags=["nodes"],
        responses={200: REPLICA.many, **refusals(401, 403, 404)},
        examples=[_EXAMPLE],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """The node's replicas in every state."""
        return Response(replicas_of(existing(node_id)))


class ReplicasView(NodeView):
    """`/api/nodes/models` (R1.61)."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="models_list",
        summary="List loaded replicas",
        tags=["nodes"],
        responses={200: REPLICA.many, **refusals(401, 403)},
        examples=[_EXAMPLE],
    )
    def get(self, request: Request) -> Response:
        """Loaded replicas on healthy nodes."""
        return Response(
            REPLICA.rows(NodeModel.objects.serving().order_by("model_name", "node_id", "replica_index"))
        )


def replicas_of(node: UUID) -> list[Row]:
    """A node's replicas for the wire."""
    return REPLICA.rows(NodeModel.objects.filter(node_id=node).order_by("model_name", "replica_index"))
