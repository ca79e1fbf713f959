"""The routes that workers call for themselves (`contract/http-api.md` §1), but for heartbeats."""

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import clock, conf, errors
from nodes import identity, services
from nodes.api import serializers as shapes
from nodes.api.auth import IsTheNode, NodeAuthentication, RegistrationAuthentication, principal
from nodes.api.openapi import flat_refusal, refusals, registration_refusal
from nodes.api.views import NodeView, client_address, replicas_of, validated
from nodes.models import NodeType
from nodes.services import Registration


class RegisterView(NodeView):
    """`/api/node/register` (R1.29)."""

    authentication_classes = [RegistrationAuthentication]
    permission_classes = []
    flat_auth = True

    @extend_schema(
        operation_id="node_register",
        tags=["worker"],
        request=shapes.RegistrationSerializer,
        parameters=[
            OpenApiParameter(
                "X-LocalAI-Node-Secret",
                str,
                OpenApiParameter.HEADER,
                description="The worker's own secret, 64 hex digits, bound to the name by its first use.",
            )
        ],
        responses={
            201: shapes.RegisteredSerializer,
            **refusals(400, 403, 409, 413),
            401: registration_refusal(),
        },
    )
    def post(self, request: Request) -> Response:
        """Makes a worker known, or refreshes it after a restart. A new one waits for approval."""
        fields = validated(shapes.RegistrationSerializer, request)
        _check_token(fields.pop("token", ""))
        registration = Registration(
            **fields | {"node_type": fields.get("node_type") or NodeType.BACKEND.value}
        )
        _check(registration)
        registered = services.register(
            registration,
            secret=request.headers.get("X-LocalAI-Node-Secret", ""),
            instance=request.headers.get("X-LocalAI-Node-Instance", ""),
            source_address=client_address(request),
            now=clock.now(),
            auto_approve=conf.cluster().auto_approve_nodes,
        )
        return Response(shapes.RegisteredSerializer(registered.node).data, status=201)


def _check_token(token: str) -> None:
    """The body carries the token too, and its refusal is nested where the header's is flat."""
    if not token:
        raise errors.NotAuthenticated("registration token required", field="token", nested=True)
    if not identity.is_registration_token(token):
        raise errors.NotAuthenticated("invalid registration token", field="token", nested=True)


def _check(registration: Registration) -> None:
    """Type, name, address, lengths, in this order."""
    if registration.node_type not in NodeType.values:
        raise errors.InvalidInput('node_type must be "backend" or "agent"', field="node_type")
    if not registration.name.strip():
        raise errors.InvalidInput("name is required", field="name")
    if registration.node_type == NodeType.BACKEND and not registration.address.strip():
        raise errors.InvalidInput("address is required for a backend node", field="address")
    for field, longest in shapes.LENGTHS.items():
        text: Any = getattr(registration, field)
        if len(text) > longest:
            raise errors.InvalidInput(f"{field} exceeds {longest} characters", field=field)
        if not text.isprintable():
            raise errors.InvalidInput(f"{field} must not contain control characters", field=field)


class SelfServiceView(NodeView):
    """A route of the node in the URL, for that node alone."""

    authentication_classes = [NodeAuthentication]
    permission_classes = [IsTheNode]
    flat_auth = True


class SelfDrainView(SelfServiceView):
    """`/api/node/:id/drain` (§1.3)."""

    @extend_schema(
        operation_id="node_drain",
        tags=["worker"],
        request=None,
        responses={200: shapes.MessageSerializer, **refusals(403, 404), 401: flat_refusal()},
    )
    def post(self, request: Request, node_id: str) -> Response:
        """The worker is stopping: nothing new goes there. The drain ends with its next registration."""
        services.drain_itself(_own_id(request), now=clock.now())
        return Response({"message": "node set to draining"})


class SelfDeregisterView(SelfServiceView):
    """`/api/node/:id/deregister` (§1.5)."""

    @extend_schema(
        operation_id="node_deregister",
        tags=["worker"],
        request=None,
        responses={200: shapes.MessageSerializer, **refusals(403, 404), 401: flat_refusal()},
    )
    def post(self, request: Request, node_id: str) -> Response:
        """The worker has stopped: offline, replicas gone; the record and its approval stay."""
        services.deactivate(_own_id(request), now=clock.now())
        return Response({"message": "node deregistered"})


class SelfReplicasView(SelfServiceView):
    """`/api/node/:id/models` (§1.6)."""

    @extend_schema(
        operation_id="node_models",
        tags=["worker"],
        responses={200: shapes.ReplicaSerializer(many=True), **refusals(403, 404), 401: flat_refusal()},
    )
    def get(self, request: Request, node_id: str) -> Response:
        """The node's replicas; a stopping worker waits until nothing is in flight."""
        return Response(replicas_of(_own_id(request)))


def _own_id(request: Request) -> Any:
    own = principal(request).node_id
    if own is None:
        raise errors.Forbidden()
    return own
