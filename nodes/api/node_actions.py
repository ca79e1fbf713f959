"""Actions of an admin on nodes: approve, reject, drain, resume, stop, rotate, revoke.

`nodes/registry/actions.py` has their messages (`contract/http-api.md` §2.5, §2.6).
"""

import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, names
from localai_cluster.web import rest
from localai_cluster.web.openapi import View, describe, response_example
from localai_cluster.web.rest import Described, NullIsAbsent, Strict, Text, Whole, validate_body
from nodes.api.base import (
    FINGERPRINT,
    NODE_ID,
    NodeView,
    actor_of,
    job_example,
    require_node,
    require_node_id,
)
from nodes.api.node_backends import ACCEPTED_SHAPE
from nodes.api.worker_routes import parse_id
from nodes.backends import node_stop
from nodes.registry import actions, bulk, lifecycle, node_rows
from nodes.registry.actions import Action
from operations.api.serializers import job_fields, requester_of

MAX_NODE_IDS = 500
_FINGERPRINT_PATTERN = re.compile("^([0-9a-fA-F]{64})?$")

_OPERATION_ID_EXAMPLE = "0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44"
_NODE_EXAMPLE = {"id": NODE_ID, "name": "gpu-a", "node_type": "backend", "status": "healthy"}
_AGENT_EXAMPLE = {"name": "agent-1", "node_type": "agent", "api_token": "lai-" + "0" * 64}
REASON_EXAMPLE = {"reason": "ticket 4711"}


class NodeIdField(Strict, serializers.UUIDField):
    """A node's id as a JSON string."""

    accepted_type = str
    complaint = "must be a node's id"


class ReasonSerializer(NullIsAbsent):
    """The reason of an action, for the timeline."""

    reason = Text(required=False, max_length=actions.MAX_REASON_LENGTH, schema={"pattern": "^[^\\u0000]*$"})


class FingerprintField(Text):
    """The fingerprint that the user has compared; "" for a node without a secret of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=64, **options)

    def to_internal_value(self, data: Any) -> str:
        text = str(super().to_internal_value(data)).lower()
        if not _FINGERPRINT_PATTERN.fullmatch(text):
            raise serializers.ValidationError("must be 64 hex digits, or empty")
        return text


class ApproveSerializer(ReasonSerializer):
    """The reason for an approval, and optionally the fingerprint that the approved worker must have."""

    fingerprint = FingerprintField(required=False, schema={"pattern": _FINGERPRINT_PATTERN.pattern})


class RejectionSerializer(ReasonSerializer):
    """The reason for a rejection, which is required because an operator will need it."""

    reason = Text(
        max_length=actions.MAX_REASON_LENGTH,
        schema={"pattern": "^[^\\u0000]*[^\\s\\u0000][^\\u0000]*$", "minLength": 1},
    )

    def validate_reason(self, reason: str) -> str:
        if not names.to_single_line(reason):
            raise serializers.ValidationError("must not be empty")
        return reason


class DrainRequestSerializer(ReasonSerializer):
    """The reason for a drain, and the seconds that running requests may take."""

    deadline_seconds = Whole(required=False, min_value=0, max_value=int(lifecycle.MAX_DRAIN_SECONDS))


def by_node_id(fingerprints: dict[str, str]) -> dict[UUID, str]:
    """Return the fingerprints by node id. Raise ValidationError for a text that is none."""
    try:
        return {UUID(text): fingerprint for text, fingerprint in fingerprints.items()}
    except ValueError:
        raise serializers.ValidationError("must be an object of node ids") from None


class ApproveManySerializer(Described, NullIsAbsent):
    """The nodes to approve. A node in `fingerprints` is approved only if it has the given fingerprint."""

    ids = serializers.ListField(child=NodeIdField(), min_length=1, max_length=MAX_NODE_IDS)
    fingerprints = serializers.DictField(child=FingerprintField(), required=False)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        texts = {"type": "string", "pattern": _FINGERPRINT_PATTERN.pattern}
        keys = {"maxProperties": MAX_NODE_IDS, "additionalProperties": texts}
        schema["properties"]["fingerprints"] |= keys
        return schema

    def validate_fingerprints(self, fingerprints: dict[str, str] | None) -> dict[UUID, str]:
        return by_node_id(fingerprints or {})


class ApproveView(NodeView):
    """`/api/nodes/:id/approve` (R1.15)."""

    @describe(
        "nodes_approve",
        actions.APPROVE.summary,
        node_rows.APPROVAL_SHAPE,
        refused=(400, 404, 409, 413),
        body=ApproveSerializer,
        sent={"reason": "ticket 4711", "fingerprint": FINGERPRINT},
        shown=_NODE_EXAMPLE | {"message": actions.APPROVE.message},
        examples=[
            response_example(
                _NODE_EXAMPLE | _AGENT_EXAMPLE | {"message": actions.APPROVE.message}, name="agent"
            )
        ],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Approves a pending node; an agent's API token is shown only in this response.

        With the `fingerprint` that the approver compared: 409 if the node has another one now.
        """
        parsed_id = require_node_id(node_id)
        fields = validate_body(ApproveSerializer, request)
        approved = lifecycle.approve(
            parsed_id,
            actor=actor_of(request),
            now=clock.now(),
            reason=fields.get("reason", ""),
            fingerprint=fields.get("fingerprint"),
        )
        return Response(node_rows.approval_body(approved))


class ApproveManyView(NodeView):
    """`/api/nodes/approve`."""

    @describe(
        "nodes_approve_many",
        "Approve several nodes",
        node_rows.APPROVAL_RESULTS_SHAPE,
        refused=(400, 413),
        body=ApproveManySerializer,
        sent={"ids": [NODE_ID, _OPERATION_ID_EXAMPLE], "fingerprints": {NODE_ID: FINGERPRINT}},
        shown={
            "approved": 1,
            "results": [
                {"id": NODE_ID, "name": "gpu-a", "status": "healthy"},
                {"id": _OPERATION_ID_EXAMPLE, "error": "node not found"},
            ],
        },
    )
    def post(self, request: Request) -> Response:
        """Approves each node separately; a refusal of one does not affect the rest.

        Agents get their API token by registering again.
        """
        fields = validate_body(ApproveManySerializer, request)
        ids: list[UUID] = list(dict.fromkeys(fields["ids"]))
        results = lifecycle.approve_many(
            ids, actor=actor_of(request), now=clock.now(), fingerprints=fields.get("fingerprints", {})
        )
        return Response(node_rows.approvals_body(results))


def describe_action(
    action: Action, body: type[ReasonSerializer] | None = None, *, operation_id: str = "", **others: Any
) -> Callable[[View], View]:
    """Describe a route that runs an action, for the API document."""
    return describe(
        operation_id or f"nodes_{action.name}",
        action.summary,
        rest.MessageSerializer,
        body=body,
        shown={"message": action.message},
        **others,
    )


def perform_action(
    request: Request, node_id: str, action: Action, body: type[ReasonSerializer] | None = None
) -> Response:
    """Run the action on a node with the options in the request's body; return its message."""
    parsed_id = require_node_id(node_id) if body else parse_id(node_id)
    options = validate_body(body, request) if body else {}
    bulk.perform(action.name, parsed_id, actor_of(request), clock.now(), options)
    return Response({"message": action.message})


_ERROR_STATUSES = (400, 404, 409, 413)


class RejectView(NodeView):
    """`/api/nodes/:id/reject`."""

    @describe_action(
        actions.REJECT,
        RejectionSerializer,
        refused=_ERROR_STATUSES,
        sent={"reason": "no such machine was announced"},
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Rejects a pending node with a reason. The node stays rejected when it registers again."""
        return perform_action(request, node_id, actions.REJECT, RejectionSerializer)


class DrainView(NodeView):
    """`/api/nodes/:id/drain` (R1.19)."""

    @describe_action(
        actions.DRAIN,
        DrainRequestSerializer,
        refused=(400, 404, 413),
        sent={"reason": "new power supply", "deadline_seconds": 600},
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Sends no new requests to the node; running requests may finish until the deadline."""
        return perform_action(request, node_id, actions.DRAIN, DrainRequestSerializer)


class ResumeView(NodeView):
    """`/api/nodes/:id/resume` (R1.18)."""

    @describe_action(actions.RESUME, ReasonSerializer, refused=_ERROR_STATUSES, sent=REASON_EXAMPLE)
    def post(self, request: Request, node_id: str) -> Response:
        """Returns the node to service; an offline node returns with its next heartbeat."""
        return perform_action(request, node_id, actions.RESUME, ReasonSerializer)


class RotateView(NodeView):
    """`/api/nodes/:id/identity/rotate`."""

    @describe_action(actions.ROTATE, refused=(404, 409), operation_id="nodes_identity_rotate", tag="identity")
    def post(self, request: Request, node_id: str) -> Response:
        """Accepts the worker's secret only for registration and rotation, so that the worker replaces it."""
        return perform_action(request, node_id, actions.ROTATE)


class RevokeView(NodeView):
    """`/api/nodes/:id/identity/revoke`."""

    @describe_action(
        actions.REVOKE,
        ReasonSerializer,
        refused=_ERROR_STATUSES,
        sent=REASON_EXAMPLE,
        operation_id="nodes_identity_revoke",
        tag="identity",
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Rejects the worker's secret for good; the node is pending again, without an identity."""
        return perform_action(request, node_id, actions.REVOKE, ReasonSerializer)


class StopView(NodeView):
    """`/api/nodes/:id/stop` (nats.md §4.11)."""

    @describe(
        "nodes_stop",
        actions.STOP.summary,
        ACCEPTED_SHAPE,
        status=202,
        meaning="The operation is recorded and goes on.",
        refused=(400, 404, 409, 413),
        body=ReasonSerializer,
        sent=REASON_EXAMPLE,
        shown=job_example(actions.STOP.message, job=_OPERATION_ID_EXAMPLE),
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Makes the worker drain itself, deregister and end. A repeated request joins the operation.

        The worker starts again only if its machine restarts it. 409 for an agent, and for a node that is
        pending or offline.
        """
        node = require_node(node_id)
        admitted = node_stop.request_stop(
            node,
            by=requester_of(request),
            now=clock.now(),
            reason=validate_body(ReasonSerializer, request).get("reason", ""),
        )
        message = actions.STOP.message if admitted.created else "the worker is already being stopped"
        return Response(ACCEPTED_SHAPE.of(**job_fields(admitted, message)), status=202)
