"""What an admin says instead of the worker: replica cap, VRAM budget (`contract/http-api.md` §2.8, §2.9)."""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.web.openapi import refusals
from localai_cluster.web.parsers import validated
from nodes.api import admin_shapes, examples
from nodes.api.parameters import REVISION
from nodes.api.views import NodeView, edit_of, existing
from nodes.registry import services


class ReplicaCapView(NodeView):
    """`/api/nodes/:id/max-replicas-per-model`."""

    @extend_schema(
        operation_id="nodes_cap",
        tags=["nodes"],
        parameters=[REVISION],
        request=admin_shapes.CapRequestSerializer,
        responses={200: admin_shapes.CapSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[examples.CAP_SENT, examples.CAP],
    )
    def put(self, request: Request, node_id: str) -> Response:
        """At most so many replicas of one model, whatever the worker says (R1.45)."""
        found = existing(node_id)
        value = validated(admin_shapes.CapRequestSerializer, request)["value"]
        node = services.set_replica_cap(found, value, **edit_of(request))
        return Response({"max_replicas_per_model": node.max_replicas_per_model})

    @extend_schema(
        operation_id="nodes_cap_reset",
        tags=["nodes"],
        parameters=[REVISION],
        responses={200: admin_shapes.ResetSerializer, **refusals(400, 401, 403, 404, 409)},
        examples=[examples.RESET],
    )
    def delete(self, request: Request, node_id: str) -> Response:
        """The worker's own value counts again from its next registration on (R1.46)."""
        services.reset_replica_cap(existing(node_id), **edit_of(request))
        return Response({"reset": True})


class VramBudgetView(NodeView):
    """`/api/nodes/:id/vram-budget`."""

    @extend_schema(
        operation_id="nodes_budget",
        tags=["nodes"],
        parameters=[REVISION],
        request=admin_shapes.BudgetRequestSerializer,
        responses={200: admin_shapes.BudgetSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[examples.BUDGET_SENT, examples.BUDGET],
    )
    def put(self, request: Request, node_id: str) -> Response:
        """A ceiling for the node's VRAM; an empty text means no cap, whatever the worker says (R1.47)."""
        found = existing(node_id)
        value = validated(admin_shapes.BudgetRequestSerializer, request)["value"]
        services.set_vram_budget(found, value, **edit_of(request))
        return Response({"vram_budget": value})

    @extend_schema(
        operation_id="nodes_budget_reset",
        tags=["nodes"],
        parameters=[REVISION],
        responses={200: admin_shapes.ResetSerializer, **refusals(400, 401, 403, 404, 409)},
        examples=[examples.RESET],
    )
    def delete(self, request: Request, node_id: str) -> Response:
        """No budget until the worker registers with one (R1.48)."""
        services.reset_vram_budget(existing(node_id), **edit_of(request))
        return Response({"reset": True})
