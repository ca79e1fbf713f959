"""Routes that a worker calls for its own node (`contract/http-api.md` §1).

Heartbeats and registration are raw ASGI routes in other modules. The routes here authenticate the node in the
URL by its secret and, if the worker sends it, by its process id.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse
from rest_framework.exceptions import MethodNotAllowed
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts import principals
from localai_cluster.accounts.authentication import principal
from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import View, describe
from localai_cluster.web.rest import MessageSerializer
from nodes.api import worker_routes
from nodes.api.base import NodeView
from nodes.api.nodes import replica_rows
from nodes.registry import claims, identity, lifecycle
from nodes.replicas.shape import REPLICA

_describe = partial(
    describe,
    refused=(400, 404, 409, 429),
    parameters=[worker_routes.INSTANCE_PARAMETER],
    others={401: OpenApiResponse(worker_routes.WORKER_REFUSAL_SHAPE.ref, worker_routes.WRONG_SECRET_MEANING)},
)


def _describe_message(
    operation_id: str, summary: str, message: str, *parameters: OpenApiParameter
) -> Callable[[View], View]:
    return _describe(
        operation_id,
        summary,
        MessageSerializer,
        meaning="Done.",
        shown={"message": message},
        parameters=[worker_routes.INSTANCE_PARAMETER, *parameters],
    )


class SelfServiceView(NodeView):
    """Base of the views that only the node in the URL may call."""

    authentication_classes = [worker_routes.NodeAuthentication]
    permission_classes = [worker_routes.IsTheNode]
    flat_auth = True
    tag = "worker"

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse an unsupported method before authentication."""
        if str(request.method).lower() not in {name.lower() for name in self.allowed_methods}:
            raise MethodNotAllowed(str(request.method))
        super().initial(request, *args, **kwargs)


class SelfView(SelfServiceView):
    """`/api/node/:id` (§1.5)."""

    @_describe_message("node_delete", "Take the worker offline", "node deregistered")
    def delete(self, request: Request, node_id: str) -> Response:
        """Takes the node offline without replicas, like deregister; its record and approval stay."""
        lifecycle.deactivate(_own_id(request), now=clock.now())
        return Response({"message": "node deregistered"})


class SelfDeregisterView(SelfServiceView):
    """`/api/node/:id/deregister` (§1.5)."""

    @_describe_message("node_deregister", "Take the worker offline on shutdown", "node deregistered")
    def post(self, request: Request, node_id: str) -> Response:
        """Takes the node offline, because its worker has stopped. Its record and approval stay."""
        lifecycle.deactivate(_own_id(request), now=clock.now())
        return Response({"message": "node deregistered"})


class SelfDrainView(SelfServiceView):
    """`/api/node/:id/drain` (§1.3)."""

    @_describe_message("node_drain", "Start the worker's own drain", "node set to draining")
    def post(self, request: Request, node_id: str) -> Response:
        """Drains the node, because its worker stops. The drain ends with the worker's next registration."""
        lifecycle.drain_by_worker(_own_id(request), now=clock.now())
        return Response({"message": "node set to draining"})


class SelfResumeView(SelfServiceView):
    """`/api/node/:id/resume` (§1.4)."""

    @_describe_message("node_resume", "End the worker's own drain", "node resumed")
    def post(self, request: Request, node_id: str) -> Response:
        """Ends the drain that the worker started; 409 for a drain that an administrator started."""
        lifecycle.resume_by_worker(_own_id(request), now=clock.now())
        return Response({"message": "node resumed"})


class SelfReplicasView(SelfServiceView):
    """`/api/node/:id/models` (§1.6)."""

    @_describe(
        "node_models",
        "List the worker's replicas",
        REPLICA.many,
        examples=[OpenApiExample("A node without replicas", [], response_only=True)],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the node's replicas; a stopping worker waits until no request is in flight."""
        return Response(replica_rows(_own_id(request)))


class SelfRotateView(SelfServiceView):
    """`/api/node/:id/rotate`, which the reference lacks."""

    rotating = True

    @_describe_message(
        "node_rotate", "Replace the worker's secret", "secret replaced", worker_routes.NEW_SECRET_PARAMETER
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Replaces the worker's secret; the old secret is rejected from then on."""
        new = request.headers.get(identity.NEW_SECRET_HEADER, "")
        identity.check_node_secret(new, identity.NEW_SECRET_HEADER)
        old = identity.node_fingerprint(principals.bearer(request.headers["authorization"]))
        if not old:
            raise errors.Conflict("a node that is known by the shared token has no secret to replace")
        claims.rotate(_own_id(request), old_fingerprint=old, new_secret=new, now=clock.now())
        return Response({"message": "secret replaced"})


def _own_id(request: Request) -> UUID:
    node_id = principal(request).node_id
    if node_id is None:
        raise errors.Forbidden()
    return node_id
