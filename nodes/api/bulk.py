"""Requests for many nodes: an action of an admin, or the installation of a backend.

Each request creates one operation with a target for each node. The operation does not depend on its caller.
"""

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts.authentication import client_address
from localai_cluster.kit import clock, errors
from localai_cluster.kit.logs import request_id
from localai_cluster.web.rest import Described, validate_body
from nodes.api import node_backends
from nodes.api.base import NODE_ID, NodeView, actor_of, job_example
from nodes.api.node_actions import DrainRequestSerializer, FingerprintField, NodeIdField, by_node_id
from nodes.api.node_settings import LABELS_SCHEMA
from nodes.api.waves import WaveOptionsSerializer, add_wave_options
from nodes.backends import admission
from nodes.backends.backend_requests import INSTALL, RequestScope, chosen_nodes
from nodes.registry import bulk
from nodes.registry.labels import MAX_KEY_LENGTH, MAX_LABELS, MAX_VALUE_LENGTH, check_labels
from operations.api.serializers import MAX_NODES, job_fields, requester_of

_KIND_BY_VERB = {kind.removeprefix("node_"): kind for kind in bulk.VERBS}
"""Kind of operation by the verb of the request, such as `approve`."""


def _node_ids_field() -> serializers.ListField:
    return serializers.ListField(child=NodeIdField(), min_length=1, max_length=MAX_NODES)


class BulkInstallSerializer(node_backends.InstallSerializer):
    """The backend to install, the nodes, and the options of waves.

    Without `waves` all nodes begin at once.
    """

    ids = _node_ids_field()
    waves = WaveOptionsSerializer(required=False)


class BulkSerializer(Described, DrainRequestSerializer):
    """An action and the nodes that it is for.

    `reject` needs a reason; `label` needs labels to set or to remove.
    """

    verb = serializers.ChoiceField(choices=list(_KIND_BY_VERB))
    ids = _node_ids_field()
    fingerprints = serializers.DictField(child=FingerprintField(), required=False)
    labels = serializers.DictField(
        child=serializers.CharField(allow_blank=True, max_length=MAX_VALUE_LENGTH, trim_whitespace=False),
        required=False,
    )
    remove_labels = serializers.ListField(
        child=serializers.CharField(max_length=MAX_KEY_LENGTH, trim_whitespace=False),
        required=False,
        max_length=MAX_LABELS,
    )

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """Add the maximum number of labels."""
        schema["properties"]["labels"] |= LABELS_SCHEMA
        return schema

    def validate_fingerprints(self, fingerprints: dict[str, str] | None) -> dict[str, str]:
        """Return the fingerprints by node id, in the registry's spelling."""
        return {str(id): fingerprint for id, fingerprint in by_node_id(fingerprints or {}).items()}

    def validate_labels(self, value: dict[str, str] | None) -> dict[str, str]:
        """Raise ValidationError for a label that no node may have."""
        try:
            check_labels(value or {})
        except errors.InvalidInput as refusal:
            raise serializers.ValidationError(refusal.message) from None
        return value or {}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Check that the fields are present which the action needs."""
        if attrs["verb"] == "reject" and not attrs.get("reason", "").strip():
            raise serializers.ValidationError({"reason": ["must not be empty"]})
        if attrs["verb"] == "label" and not (attrs.get("labels") or attrs.get("remove_labels")):
            raise serializers.ValidationError({"labels": ["must not be empty"]})
        return attrs


def _verb_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of the action that the request contains."""
    names = ("reason", "deadline_seconds", "fingerprints", "labels", "remove_labels")
    return {name: fields[name] for name in names if fields.get(name) not in (None, "", {}, [])}


class BulkView(NodeView):
    """`/api/nodes/bulk`."""

    @node_backends.describe_accepted(
        "nodes_bulk",
        "Run a verb on many nodes",
        refused=(400, 409, 413),
        body=BulkSerializer,
        sent={"verb": "drain", "ids": [NODE_ID], "reason": "new power supply", "deadline_seconds": 600},
        shown=job_example("drain of 1 node started"),
    )
    def post(self, request: Request) -> Response:
        """Runs one action on each of the nodes, as one operation that continues without its caller.

        If a node cannot take the action, nothing starts: the 409 names such nodes with their reasons. If a
        node changes afterwards, only its part fails. Agents get their API token by registering again.
        """
        fields = validate_body(BulkSerializer, request)
        bulk_request = bulk.BulkRequest(
            _KIND_BY_VERB[fields["verb"]],
            fields["ids"],
            actor_of(request),
            _verb_arguments(fields),
            request_id=request_id.get(),
            client_address=client_address(request),
        )
        admitted = bulk.request(bulk_request, now=clock.now())
        started = "started" if admitted.created else "in progress already"
        message = f"{fields['verb']} of {admitted.operation.element} {started}"
        return Response(node_backends.ACCEPTED_SHAPE.of(**job_fields(admitted, message)), status=202)


class BulkInstallView(NodeView):
    """`/api/nodes/backends/install`."""

    @node_backends.describe_accepted(
        "nodes_bulk_install",
        "Install a backend on many nodes",
        refused=(400, 409, 413),
        body=BulkInstallSerializer,
        sent={"ids": [NODE_ID], "backend": "local@minilm"},
        shown=job_example("backend installation started"),
        tag="backends",
    )
    def post(self, request: Request) -> Response:
        """Installs a backend on these nodes as one operation. Nodes that have the backend keep its files.

        If a node cannot take the backend, nothing starts: the 409 names such nodes with their reasons.
        """
        fields = validate_body(BulkInstallSerializer, request)
        command, ids = node_backends.install_request(fields), fields["ids"]
        nodes = chosen_nodes(command, ids, field="ids")
        scope = add_wave_options(RequestScope(nodes, requester_of(request)), fields)
        admitted = admission.admit_on_nodes(command, scope, field="ids", now=clock.now())
        return Response(node_backends.accepted_body(admitted, INSTALL), status=202)
