"""Identity conflicts: other machines that claim to be a node. An administrator accepts or refuses them."""

from uuid import UUID

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors
from localai_cluster.web import rest
from localai_cluster.web.openapi import refusals
from nodes.api.base import (
    FINGERPRINT,
    MOMENT,
    NODE_ID,
    NodeView,
    actor_of,
    describe_list,
    message_example,
    require_node_id,
    response_example,
)
from nodes.api.worker_routes import parse_node_id
from nodes.models import NodeConflict
from nodes.registry import actions, claims, listing
from nodes.registry.shape import CONFLICT

USUAL_PAGE = 100
_EXAMPLE = response_example(
    [
        {
            "id": "0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44",
            "node_id": NODE_ID,
            "node_name": "gpu-a",
            "kind": "secret",
            "state": "open",
            "fingerprint": FINGERPRINT,
            "source_address": "10.1.0.9",
            "advertised_address": "10.1.0.9:50051",
            "node_source_address": "10.1.0.4",
            "count": 3,
            "first_at": MOMENT,
            "last_at": MOMENT,
        }
    ]
)


class ConflictsView(NodeView):
    """`/api/nodes/conflicts`."""

    @describe_list(
        "conflicts_list", "List open identity conflicts", tag="identity", rows=CONFLICT.many, example=_EXAMPLE
    )
    def get(self, request: Request) -> Response:
        """Identity conflicts of all nodes that await a decision, latest first."""
        return conflicts_page(request, NodeConflict.objects.filter(state="open"))


class NodeConflictsView(NodeView):
    """`/api/nodes/:id/conflicts`."""

    @describe_list(
        "nodes_conflicts",
        "List a node's identity conflicts",
        tag="identity",
        rows=CONFLICT.many,
        example=_EXAMPLE,
        refused=(400, 401, 403, 404),
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Claims to this node's identity, open and resolved, latest first."""
        return conflicts_page(request, NodeConflict.objects.filter(node=require_node_id(node_id)))


def conflicts_page(request: Request, conflicts: QuerySet[NodeConflict]) -> Response:
    page = listing.page_of(listing.Parameters(request.query_params, "limit", "offset"), USUAL_PAGE)
    rows = CONFLICT.rows(conflicts.order_by("-last_at", "id")[page.part])
    return Response(rows, headers=page.headers(request, conflicts.count()))


class AcceptView(NodeView):
    """`/api/nodes/:id/conflicts/:cid/accept`."""

    @extend_schema(
        operation_id="conflicts_accept",
        summary=actions.ACCEPT.summary,
        tags=["identity"],
        request=None,
        responses={200: rest.MessageSerializer, **refusals(401, 403, 404, 409)},
        examples=[message_example(actions.ACCEPT.message)],
    )
    def post(self, request: Request, node_id: str, conflict_id: str) -> Response:
        """The claimant becomes the node; the node's previous secret is permanently rejected."""
        node, conflict = _parse_ids(node_id, conflict_id)
        claims.accept_conflict(conflict, node_id=node, actor=actor_of(request), now=clock.now())
        return Response({"message": actions.ACCEPT.message})


class RefuseView(NodeView):
    """`/api/nodes/:id/conflicts/:cid/refuse`."""

    @extend_schema(
        operation_id="conflicts_refuse",
        summary=actions.REFUSE.summary,
        tags=["identity"],
        request=None,
        responses={200: rest.MessageSerializer, **refusals(401, 403, 404, 409)},
        examples=[message_example(actions.REFUSE.message)],
    )
    def post(self, request: Request, node_id: str, conflict_id: str) -> Response:
        """The node keeps its identity; the claimant stays refused."""
        node, conflict = _parse_ids(node_id, conflict_id)
        claims.refuse_conflict(conflict, node_id=node, actor=actor_of(request), now=clock.now())
        return Response({"message": actions.REFUSE.message})


def _parse_ids(node_id: str, conflict_id: str) -> tuple[UUID, UUID]:
    node, conflict = require_node_id(node_id), parse_node_id(conflict_id)
    if conflict is None:
        raise errors.NotFound("conflict not found")
    return node, conflict
