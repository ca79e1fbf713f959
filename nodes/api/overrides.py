"""What an admin says instead of the worker: replica cap, VRAM budget (`contract/http-api.md` §2.8, §2.9)."""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import NullIsAbsent, Text, Whole, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, Shape, count, field
from nodes.api.base import REVISION, NodeView, answered, edit_of, existing, sent
from nodes.registry import services
from nodes.registry.overrides import LARGEST_CAP, LONGEST_BUDGET

CAP = Shape("Cap", "The cap that holds now.", [field("max_replicas_per_model", count(1))])
BUDGET = Shape("Budget", "The budget as sent.", [field("vram_budget", TEXT)])
RESET = Shape("Reset", "The override is handed back.", [field("reset", FLAG)])
_RESET = answered({"reset": True})


class CapRequestSerializer(NullIsAbsent):
    """At most so many replicas of one model."""

    value = Whole(min_value=1, max_value=LARGEST_CAP)


class BudgetRequestSerializer(NullIsAbsent):
    """`80%`, `0.8`, `16GB`, `15GiB`, bytes; an empty text means no cap and is as sticky as any other."""

    value = Text(max_length=LONGEST_BUDGET)


class ReplicaCapView(NodeView):
    """`/api/nodes/:id/max-replicas-per-model`."""

    @extend_schema(
        operation_id="nodes_cap",
        summary="Set the maximum replicas per model",
        tags=["nodes"],
        parameters=[REVISION],
        request=CapRequestSerializer,
        responses={200: CAP.ref, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[sent({"value": 3}), answered({"max_replicas_per_model": 3})],
    )
    def put(self, request: Request, node_id: str) -> Response:
        """Overrides the worker's own value (R1.45)."""
        found = existing(node_id)
        value = validate_body(CapRequestSerializer, request)["value"]
        node = services.set_replica_cap(found, value, **edit_of(request))
        return Response(CAP.of(max_replicas_per_model=node.max_replicas_per_model))

    @extend_schema(
        operation_id="nodes_cap_reset",
        summary="Reset the maximum replicas per model",
        tags=["nodes"],
        parameters=[REVISION],
        responses={200: RESET.ref, **refusals(400, 401, 403, 404, 409)},
        examples=[_RESET],
    )
    def delete(self, request: Request, node_id: str) -> Response:
        """The worker's own value applies again from its next registration (R1.46)."""
        services.reset_replica_cap(existing(node_id), **edit_of(request))
        return Response(RESET.of(reset=True))


class VramBudgetView(NodeView):
    """`/api/nodes/:id/vram-budget`."""

    @extend_schema(
        operation_id="nodes_budget",
        summary="Set the VRAM budget",
        tags=["nodes"],
        parameters=[REVISION],
        request=BudgetRequestSerializer,
        responses={200: BUDGET.ref, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[sent({"value": "80%"}), answered({"vram_budget": "80%"})],
    )
    def put(self, request: Request, node_id: str) -> Response:
        """Limits the node's VRAM against the worker's reports; an empty text means unlimited (R1.47)."""
        found = existing(node_id)
        value = validate_body(BudgetRequestSerializer, request)["value"]
        services.set_vram_budget(found, value, **edit_of(request))
        return Response(BUDGET.of(vram_budget=value))

    @extend_schema(
        operation_id="nodes_budget_reset",
        summary="Reset the VRAM budget",
        tags=["nodes"],
        parameters=[REVISION],
        responses={200: RESET.ref, **refusals(400, 401, 403, 404, 409)},
        examples=[_RESET],
    )
    def delete(self, request: Request, node_id: str) -> Response:
        """Unlimited until the worker registers with a budget (R1.48)."""
        services.reset_vram_budget(existing(node_id), **edit_of(request))
        return Response(RESET.of(reset=True))
