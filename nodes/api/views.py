"""The registry's routes for admins: the list, one node, replicas (`contract/http-api.md` §2.1 to §2.4).

What is done to a node has modules of its own: `lifecycle_views`, `label_views`, `override_views`,
`identity_views`. Here is also what all of them share: the envelope, bodies, and ids that exist.
"""

from typing import Any
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import clock, errors
from localai_cluster.accounts.actors import Actor, of_principal
from localai_cluster.accounts.authentication import principal
from localai_cluster.web import fields
from localai_cluster.web.openapi import refusals
from localai_cluster.web.renderers import FastJSONRenderer
from nodes.api import examples, node_shapes
from nodes.api import serializers as shapes
from nodes.api.parameters import MOST_REVISION, NODE_PARAMETERS, PAGE_HEADERS
from nodes.api.worker_auth import parse_node_id
from nodes.models import BackendNode, NodeModel
from nodes.registry import listing, node_rows, services


class NodeView(APIView):
    """A route whose errors are `node_error`s."""

    error_type = "node_error"


def existing(text: str) -> UUID:
    """The id of a node that exists; raises NotFound."""
    found = parse_node_id(text)
    if found is None or not BackendNode.objects.filter(pk=found).exists():
        raise errors.NotFound("node not found")
    return found


def actor_of(request: Request) -> Actor:
    """Who the timeline says it was."""
    return of_principal(principal(request))


def edit_of(request: Request) -> dict[str, Any]:
    """Who edits a node, when, and which revision he saw, None if he does not say (UW35).

    Raises InvalidInput for what is no revision.
    """
    seen = listing.Parameters(request.query_params, "revision").number("revision", 0, MOST_REVISION)
    return {"actor": actor_of(request), "now": clock.now(), "revision": seen}


class NodesView(NodeView):
    """`/api/nodes` (R1.61)."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_list",
        tags=["nodes"],
        parameters=[*NODE_PARAMETERS, *PAGE_HEADERS],
        responses={200: node_shapes.NodeSerializer(many=True), **refusals(400, 401, 403)},
        examples=[examples.NODE],
    )
    def get(self, request: Request) -> Response:
        """All nodes, by name; or those that the parameters ask for."""
        wanted = listing.wanted_nodes(request)
        whole = wanted.page.whole and not wanted.filtered
        rows = node_rows.elements(wanted.nodes[wanted.page.part], whole=whole)
        total = len(rows) if wanted.page.whole else wanted.nodes.count()
        return Response(rows, headers=wanted.page.headers(request, total))


class NodeDetailView(NodeView):
    """`/api/nodes/:id`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_read",
        tags=["nodes"],
        responses={200: node_shapes.NodeDetailSerializer, **refusals(401, 403, 404)},
        examples=[examples.NODE_DETAIL],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """One node: as in the list, and what lies behind its status."""
        found = parse_node_id(node_id)
        node = None if found is None else node_rows.detail(found)
        if node is None:
            raise errors.NotFound("node not found")
        return Response(node)

    @extend_schema(
        operation_id="nodes_delete",
        tags=["nodes"],
        responses={200: fields.MessageSerializer, **refusals(401, 403, 404)},
        examples=[examples.message("node deregistered")],
    )
    def delete(self, request: Request, node_id: str) -> Response:
        """Removes the record with its replicas, labels and conflicts; the timeline stays (R1.21)."""
        services.deregister(existing(node_id), actor=actor_of(request), now=clock.now())
        return Response({"message": "node deregistered"})


class NodeReplicasView(NodeView):
    """`/api/nodes/:id/models`."""

    @extend_schema(
        operation_id="nodes_models",
        tags=["nodes"],
        responses={200: shapes.ReplicaSerializer(many=True), **refusals(401, 403, 404)},
        examples=[examples.REPLICA],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """The node's replicas in every state."""
        return Response(replicas_of(existing(node_id)))


class ReplicasView(NodeView):
    """`/api/nodes/models` (R1.61)."""

    @extend_schema(
        operation_id="models_list",
        tags=["nodes"],
        responses={200: shapes.ReplicaSerializer(many=True), **refusals(401, 403)},
        examples=[examples.REPLICA],
    )
    def get(self, request: Request) -> Response:
        """Loaded replicas on healthy nodes."""
        rows = NodeModel.objects.serving().order_by("model_name", "node_id", "replica_index")
        return Response(shapes.ReplicaSerializer(rows, many=True).data)


def replicas_of(node: UUID) -> Any:
    """A node's replicas for the wire."""
    rows = NodeModel.objects.filter(node_id=node).order_by("model_name", "replica_index")
    return shapes.ReplicaSerializer(rows, many=True).data
