"""What an admin does to nodes: approve, reject, drain, resume (`contract/http-api.md` §2.5, §2.6)."""

import re
from typing import Any
from uuid import UUID

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts.authentication import client_address
from localai_cluster.kit import clock, names
from localai_cluster.kit.logs import request_id
from localai_cluster.web import rest
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import Described, NullIsAbsent, Strict, Text, Whole, validate_body
from nodes.api.base import FINGERPRINT, NODE_ID, NodeView, actor_of, answered, existing, message, sent
from nodes.api.installs import ACCEPTED
from nodes.backends import node_stop
from nodes.models import BackendNode
from nodes.registry import outcomes, services

LONGEST_REASON = 255
MOST_IDS = 500
_FINGERPRINT = re.compile("^([0-9a-fA-F]{64})?$")
_NO_NULL = "^[^\\u0000]*$"

_OTHER_ID = "0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44"
_WHO = {"id": NODE_ID, "name": "gpu-a", "node_type": "backend", "status": "healthy"}
_AGENT = {"name": "agent-1", "node_type": "agent", "api_token": "lai-" + "0" * 64}
REASON = sent({"reason": "ticket 4711"})


_STOPPING = {
    "jobID": _OTHER_ID,
    "statusUrl": f"/api/backends/job/{_OTHER_ID}",
    "message": "the worker is being stopped",
}


class NodeIds(Strict, serializers.UUIDField):
    """A node's id as a JSON string."""

    accepts = str
    complaint = "must be a node's id"


class ReasonSerializer(Described, NullIsAbsent):
    """Why, for the timeline."""

    reason = Text(required=False, allow_null=True, max_length=LONGEST_REASON)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """Without what no text column can keep."""
        schema["properties"]["reason"]["pattern"] = _NO_NULL
        return schema


class Fingerprints(Text):
    """The fingerprint that somebody compared; "" for a node without a secret of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=64, **options)

    def to_internal_value(self, data: Any) -> str:
        """In lower case, as the registry has it."""
        text = str(super().to_internal_value(data)).lower()
        if not _FINGERPRINT.fullmatch(text):
            raise serializers.ValidationError("must be 64 hex digits, or empty")
        return text


class ApproveSerializer(ReasonSerializer):
    """Why, and whom: with a fingerprint, only the worker that has it is let in."""

    fingerprint = Fingerprints(required=False, allow_null=True)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of a fingerprint."""
        schema["properties"]["fingerprint"]["pattern"] = _FINGERPRINT.pattern
        return super().described(schema)


class RejectionSerializer(ReasonSerializer):
    """Why a node is rejected: an operator will ask."""

    reason = Text(max_length=LONGEST_REASON)

    def validate_reason(self, reason: str) -> str:
        """Something to read."""
        if not names.plain(reason):
            raise serializers.ValidationError("must not be empty")
        return reason

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With something to read in it."""
        schema["properties"]["reason"] |= {"pattern": "^[^\\u0000]*[^\\s\\u0000][^\\u0000]*$", "minLength": 1}
        return schema


class DrainRequestSerializer(ReasonSerializer):
    """Why, and how long the running requests may take."""

    deadline_seconds = Whole(
        required=False, allow_null=True, min_value=0, max_value=int(services.LONGEST_DEADLINE)
    )


class ApproveManySerializer(Described, NullIsAbsent):
    """Which nodes; a node that stands in `fingerprints` only with the fingerprint given there."""

    ids = serializers.ListField(child=NodeIds(), min_length=1, max_length=MOST_IDS)
    fingerprints = serializers.DictField(child=Fingerprints(), required=False, allow_null=True)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of a fingerprint, and how many."""
        texts = {"type": "string", "pattern": _FINGERPRINT.pattern}
        keys = {"maxProperties": MOST_IDS, "additionalProperties": texts}
        schema["properties"]["fingerprints"] |= keys
        return schema

    def validate_fingerprints(self, given: dict[str, str] | None) -> dict[UUID, str]:
        """By id."""
        try:
            return {UUID(text): fingerprint for text, fingerprint in (given or {}).items()}
        except ValueError:
            raise serializers.ValidationError("must be an object of node ids") from None


class ApproveView(NodeView):
    """`/api/nodes/:id/approve` (R1.15)."""

    @extend_schema(
        operation_id="nodes_approve",
        summary="Approve a node",
        tags=["nodes"],
        request=ApproveSerializer,
        responses={200: outcomes.APPROVED.ref, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[
            sent({"reason": "ticket 4711", "fingerprint": FINGERPRINT}),
            answered(_WHO | {"message": "node approved"}),
            answered(_WHO | _AGENT | {"message": "node approved"}, "agent"),
        ],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Approves a pending node; an agent's API token is shown only in this answer.

        With the `fingerprint` that the approver compared, 409 if the node has another one now.
        """
        found = existing(node_id)
        fields = validate_body(ApproveSerializer, request)
        approved = services.approve(
            found,
            actor=actor_of(request),
            now=clock.now(),
            reason=fields.get("reason", ""),
            fingerprint=fields.get("fingerprint"),
        )
        return Response(outcomes.approved(approved))


class ApproveManyView(NodeView):
    """`/api/nodes/approve`."""

    @extend_schema(
        operation_id="nodes_approve_many",
        summary="Approve several nodes",
        tags=["nodes"],
        request=ApproveManySerializer,
        responses={200: outcomes.OUTCOMES.ref, **refusals(400, 401, 403, 413)},
        examples=[
            sent({"ids": [NODE_ID, _OTHER_ID], "fingerprints": {NODE_ID: FINGERPRINT}}),
            answered(
                {
                    "approved": 1,
                    "results": [
                        {"id": NODE_ID, "name": "gpu-a", "status": "healthy"},
                        {"id": _OTHER_ID, "error": "node not found"},
                    ],
                }
            ),
        ],
    )
    def post(self, request: Request) -> Response:
        """Approves each node separately; one refusal does not affect the others.

        Agents get their API token by registering again.
        """
        fields = validate_body(ApproveManySerializer, request)
        ids: list[UUID] = list(dict.fromkeys(fields["ids"]))
        found = services.approve_many(
            ids, actor=actor_of(request), now=clock.now(), fingerprints=fields.get("fingerprints", {})
        )
        return Response(outcomes.outcomes(found))


class RejectView(NodeView):
    """`/api/nodes/:id/reject`."""

    @extend_schema(
        operation_id="nodes_reject",
        summary="Reject a node",
        tags=["nodes"],
        request=RejectionSerializer,
        responses={200: rest.MessageSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[sent({"reason": "no such machine was announced"}), message("node rejected")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Rejects a pending node with a reason. Re-registering does not change that."""
        found = existing(node_id)
        reason = validate_body(RejectionSerializer, request)["reason"]
        services.reject(found, actor=actor_of(request), now=clock.now(), reason=reason)
        return Response({"message": "node rejected"})


class DrainView(NodeView):
    """`/api/nodes/:id/drain` (R1.19)."""

    @extend_schema(
        operation_id="nodes_drain",
        summary="Drain a node",
        tags=["nodes"],
        request=DrainRequestSerializer,
        responses={200: rest.MessageSerializer, **refusals(400, 401, 403, 404, 413)},
        examples=[
            sent({"reason": "new power supply", "deadline_seconds": 600}),
            message("node set to draining"),
        ],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Sends no new requests to the node; running ones may finish until the deadline."""
        found = existing(node_id)
        fields = validate_body(DrainRequestSerializer, request)
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
        summary="Resume a node",
        tags=["nodes"],
        request=ReasonSerializer,
        responses={200: rest.MessageSerializer, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[REASON, message("node resumed")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Returns the node to service; an offline node after its next heartbeat."""
        found = existing(node_id)
        reason = validate_body(ReasonSerializer, request).get("reason", "")
        services.resume(found, actor=actor_of(request), now=clock.now(), reason=reason)
        return Response({"message": "node resumed"})


class StopView(NodeView):
    """`/api/nodes/:id/stop` (nats.md §4.11)."""

    @extend_schema(
        operation_id="nodes_stop",
        summary="Stop the worker of a node",
        tags=["nodes"],
        request=ReasonSerializer,
        responses={
            202: OpenApiResponse(ACCEPTED.ref, "The operation is recorded and goes on."),
            **refusals(400, 401, 403, 404, 409, 413),
        },
        examples=[REASON, answered(_STOPPING, status="202")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Tells the worker to drain itself, to leave and to end. A repeated request joins the operation.

        It comes back only if its machine starts it again. 409 for an agent, and for a node that is pending or
        offline.
        """
        node = BackendNode.objects.get(pk=existing(node_id))
        admission = node_stop.request_stop(
            node,
            actor=actor_of(request).name,
            now=clock.now(),
            reason=validate_body(ReasonSerializer, request).get("reason", ""),
            request_id=request_id.get(),
            client_address=client_address(request),
        )
        job = str(admission.operation.id)
        body = ACCEPTED.of(
            message="the worker is being stopped"
            if admission.created
            else "the worker is already being stopped",
            jobID=job,
            statusUrl=f"/api/backends/job/{job}",
            deduplicated=not admission.created,
        )
        return Response(body, status=202)
