"""What an admin does to nodes: approve, reject, drain, resume (`contract/http-api.md` §2.5, §2.6)."""

from typing import Any
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import clock
from localai_cluster.web import fields
from localai_cluster.web.openapi import refusals
from localai_cluster.web.parsers import validated
from nodes.api import admin_shapes, examples, node_shapes
from nodes.api.views import NodeView, actor_of, existing
from nodes.registry import services
from nodes.registry.services import Outcome


class ApproveView(NodeView):
    """`/api/nodes/:id/approve` (R1.15)."""

    @extend_schema(
        operation_id="nodes_approve",
        tags=["nodes"],
        request=admin_shapes.ApproveSerializer,
        responses={200: node_shapes.ApprovedSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[examples.APPROVE, examples.APPROVED, examples.APPROVED_AGENT],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Lets a pending node into the fleet; an agent's API token is shown this once.

        With the `fingerprint` that the approver compared, 409 if the node has another one now.
        """
        found = existing(node_id)
        fields = validated(admin_shapes.ApproveSerializer, request)
        approved = services.approve(
            found,
            actor=actor_of(request),
            now=clock.now(),
            reason=fields.get("reason", ""),
            fingerprint=fields.get("fingerprint"),
        )
        node = approved.node
        shown = {"id": node.id, "name": node.name, "node_type": node.node_type, "status": node.status}
        token = {"api_token": approved.api_token} if approved.api_token else {}
        return Response(shown | {"message": "node approved"} | token)


class ApproveManyView(NodeView):
    """`/api/nodes/approve`."""

    @extend_schema(
        operation_id="nodes_approve_many",
        tags=["nodes"],
        request=admin_shapes.ApproveManySerializer,
        responses={200: admin_shapes.OutcomesSerializer, **refusals(400, 401, 403, 413)},
        examples=[examples.APPROVE_MANY, examples.OUTCOMES],
    )
    def post(self, request: Request) -> Response:
        """Lets several nodes in, each on its own: what is wrong with one does not stop the others.

        Agents get their API token by registering again.
        """
        fields = validated(admin_shapes.ApproveManySerializer, request)
        ids: list[UUID] = list(dict.fromkeys(fields["ids"]))
        outcomes = services.approve_many(
            ids, actor=actor_of(request), now=clock.now(), fingerprints=fields.get("fingerprints", {})
        )
        approved = sum(not outcome.error for outcome in outcomes)
        return Response({"approved": approved, "results": [_shown(outcome) for outcome in outcomes]})


def _shown(outcome: Outcome) -> dict[str, Any]:
    if outcome.error:
        return {"id": outcome.id, "error": outcome.error}
    shown = {"id": outcome.id, "name": outcome.name, "status": outcome.status}
    return shown | ({"api_token": outcome.api_token} if outcome.api_token else {})


class RejectView(NodeView):
    """`/api/nodes/:id/reject`."""

    @extend_schema(
        operation_id="nodes_reject",
        tags=["nodes"],
        request=admin_shapes.RejectionSerializer,
        responses={200: fields.MessageSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[examples.REJECTION, examples.message("node rejected")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Says no to a pending node, with the reason. Registering again does not change that."""
        found = existing(node_id)
        reason = validated(admin_shapes.RejectionSerializer, request)["reason"]
        services.reject(found, actor=actor_of(request), now=clock.now(), reason=reason)
        return Response({"message": "node rejected"})


class DrainView(NodeView):
    """`/api/nodes/:id/drain` (R1.19)."""

    @extend_schema(
        operation_id="nodes_drain",
        tags=["nodes"],
        request=admin_shapes.DrainRequestSerializer,
        responses={200: fields.MessageSerializer, **refusals(400, 401, 403, 404, 413)},
        examples=[examples.DRAIN, examples.message("node set to draining")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Sends nothing new there; what runs may go on until the deadline."""
        found = existing(node_id)
        fields = validated(admin_shapes.DrainRequestSerializer, request)
        services.drain(
            found,
            actor=actor_of(request),
            now=clock.now(),
            reason=fields.get("reason", ""),
            deadline=fields.get("deadline_seconds"),
        )
        return Response({"message": "node set to draining"})


class ResumeView(NodeView):
    """`/api/nodes/:id/resume` (R1.18)."""

    @extend_schema(
        operation_id="nodes_resume",
        tags=["nodes"],
        request=admin_shapes.ReasonSerializer,
        responses={200: fields.MessageSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[examples.REASON, examples.message("node resumed")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Takes the node into service again; one that is offline waits for its next heartbeat."""
        found = existing(node_id)
        reason = validated(admin_shapes.ReasonSerializer, request).get("reason", "")
        services.resume(found, actor=actor_of(request), now=clock.now(), reason=reason)
        return Response({"message": "node resumed"})
