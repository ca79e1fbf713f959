"""The registry's routes for admins: nodes, their replicas, approval, installs (`contract/http-api.md` §2)."""

from typing import Any
from uuid import UUID

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import clock, errors
from localai_cluster.logs import request_id
from nodes import services
from nodes.actors import of_principal
from nodes.api import serializers as shapes
from nodes.api.auth import parse_node_id, principal
from nodes.api.openapi import refusals
from nodes.api.parsers import MALFORMED
from nodes.backends import install
from nodes.models import BackendNode, NodeModel
from operations.services import OperationRequest, admit


class NodeView(APIView):
    """A route whose errors are `node_error`s."""

    error_type = "node_error"


def validated(shape: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    """The body's fields; raises InvalidInput for anything but an object, ValidationError naming a field."""
    if not isinstance(request.data, dict):
        raise errors.InvalidInput(MALFORMED)
    serializer = shape(data=request.data)
    serializer.is_valid(raise_exception=True)
    fields: dict[str, Any] = serializer.validated_data
    return fields


def existing(text: str) -> UUID:
    """The id of a node that exists; raises NotFound."""
    found = parse_node_id(text)
    if found is None or not BackendNode.objects.filter(pk=found).exists():
        raise errors.NotFound("node not found")
    return found


def client_address(request: Request) -> str:
    """Where the request came from, as far as the socket tells."""
    return str(request.META.get("REMOTE_ADDR") or "")[:64]


class NodesView(NodeView):
    """`/api/nodes` (R1.61)."""

    @extend_schema(
        operation_id="nodes_list",
        tags=["nodes"],
        responses={200: shapes.NodeSerializer(many=True), **refusals(401, 403)},
    )
    def get(self, request: Request) -> Response:
        """All nodes, by name."""
        nodes = BackendNode.objects.with_counts().order_by("name")
        return Response(shapes.NodeSerializer(nodes, many=True).data)


class NodeDetailView(NodeView):
    """`/api/nodes/:id`."""

    @extend_schema(
        operation_id="nodes_read",
        tags=["nodes"],
        responses={200: shapes.NodeDetailSerializer, **refusals(401, 403, 404)},
    )
    def get(self, request: Request, node_id: str) -> Response:
        """One node, with its labels and counts."""
        node = BackendNode.objects.with_counts().get(pk=existing(node_id))
        return Response(shapes.NodeDetailSerializer(node).data)


class NodeReplicasView(NodeView):
    """`/api/nodes/:id/models`."""

    @extend_schema(
        operation_id="nodes_models",
        tags=["nodes"],
        responses={200: shapes.ReplicaSerializer(many=True), **refusals(401, 403, 404)},
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
    )
    def get(self, request: Request) -> Response:
        """Loaded replicas on healthy nodes."""
        rows = NodeModel.objects.serving().order_by("model_name", "node_id", "replica_index")
        return Response(shapes.ReplicaSerializer(rows, many=True).data)


def replicas_of(node: UUID) -> Any:
    """A node's replicas for the wire."""
    rows = NodeModel.objects.filter(node_id=node).order_by("model_name", "replica_index")
    return shapes.ReplicaSerializer(rows, many=True).data


class ApproveView(NodeView):
    """`/api/nodes/:id/approve` (R1.15)."""

    @extend_schema(
        operation_id="nodes_approve",
        tags=["nodes"],
        request=None,
        responses={200: shapes.ApprovedSerializer, **refusals(400, 401, 403, 404)},
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Lets a pending node into the fleet."""
        node = services.approve(
            existing(node_id), actor=of_principal(principal(request)), now=clock.now()
        ).node
        shown = {"id": node.id, "name": node.name, "node_type": node.node_type, "status": node.status}
        return Response(shown | {"message": "node approved"})


class InstallView(NodeView):
    """`/api/nodes/:id/backends/install`."""

    @extend_schema(
        operation_id="nodes_backends_install",
        tags=["backends"],
        request=shapes.InstallSerializer,
        responses={
            202: OpenApiResponse(
                shapes.AcceptedSerializer, "The operation is recorded and will be carried out."
            ),
            **refusals(400, 401, 403, 404, 409, 413),
        },
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Installs a backend on one node. Asking again while it runs joins the running operation."""
        fields = validated(shapes.InstallSerializer, request)
        node = install.find_node(existing(node_id))
        wanted = {name: fields.get(name, "") for name in ("backend", "uri", "name", "alias")}
        wanted["backend"] = wanted["backend"] or wanted["name"]
        element = wanted["backend"] or wanted["uri"]
        if not element:
            raise errors.InvalidInput("backend name or uri required", field="backend")
        asked = OperationRequest(
            install.KIND,
            key=install.key(node.id, element.rpartition("@")[2] if wanted["backend"] else element),
            element=element[:255],
            payload=wanted | {"backend_galleries": fields.get("backend_galleries", "")},
            actor=principal(request).name,
            node=(node.id, node.name),
            targets=[(node.id, node.name)],
            request_id=request_id.get(),
            client_address=client_address(request),
        )
        admission = admit(asked, now=clock.now())
        job = str(admission.operation.id)
        body = {
            "jobID": job,
            "statusUrl": f"/api/backends/job/{job}",
            "message": "backend installation started" if admission.created else "already being installed",
        }
        return Response(body if admission.created else body | {"deduplicated": True}, status=202)
