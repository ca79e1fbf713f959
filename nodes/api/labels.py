"""A node's labels (`contract/http-api.md` §2.7)."""

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import errors, names
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import MALFORMED
from nodes.api.base import REVISION, NodeView, Schema, answered, edit_of, existing, sent
from nodes.models import NodeLabel, selectors
from nodes.registry import services

LABEL_KEY = OpenApiParameter(
    "key",
    {"type": "string", "minLength": 1},
    OpenApiParameter.PATH,
    description="The label's key; everything after `labels/`, slashes too.",
)
LABELS: Schema = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {"type": "string", "maxLength": selectors.LONGEST_VALUE},
    "description": "Key to value; keys have 1 to 128 characters.",
}
_SENT = sent({"tier": "fast"})
_EXAMPLE = answered({"gpu.vendor": "nvidia", "node.name": "gpu-a", "node.replica-slots": "2"})


class LabelsView(NodeView):
    """`/api/nodes/:id/labels`."""

    @extend_schema(
        operation_id="nodes_labels",
        summary="List a node's labels",
        tags=["nodes"],
        responses={(200, "application/json"): LABELS, **refusals(401, 403, 404)},
        examples=[_EXAMPLE],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Key to value."""
        rows = NodeLabel.objects.filter(node=existing(node_id)).order_by("key")
        return Response(dict(rows.values_list("key", "value")))

    @extend_schema(
        operation_id="nodes_labels_replace",
        summary="Replace a node's labels",
        tags=["nodes"],
        parameters=[REVISION],
        request={"application/json": LABELS},
        responses={(200, "application/json"): LABELS, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[_SENT, _EXAMPLE],
    )
    def put(self, request: Request, node_id: str) -> Response:
        """Replaces all labels; automatic ones return when the worker registers again."""
        found = existing(node_id)
        return Response(services.set_labels(found, labels_in(request), **edit_of(request)))

    @extend_schema(
        operation_id="nodes_labels_merge",
        summary="Add or change labels",
        tags=["nodes"],
        parameters=[REVISION],
        request={"application/json": LABELS},
        responses={(200, "application/json"): LABELS, **refusals(400, 401, 403, 404, 409, 413)},
        examples=[_SENT, _EXAMPLE],
    )
    def patch(self, request: Request, node_id: str) -> Response:
        """Other labels stay; the answer has all of them."""
        found = existing(node_id)
        return Response(services.merge_labels(found, labels_in(request), **edit_of(request)))


def labels_in(request: Request) -> dict[str, str]:
    """The body's labels; raises InvalidInput naming the key whose value is not a text."""
    if not isinstance(request.data, dict):
        raise errors.InvalidInput(MALFORMED)
    for key, value in request.data.items():
        if not isinstance(value, str):
            names.check_text(key, "labels: a key")
            raise errors.InvalidInput(f"labels.{key[:128]}: must be a string", field=f"labels.{key[:128]}")
    labels: dict[str, Any] = request.data
    return labels


class LabelView(NodeView):
    """`/api/nodes/:id/labels/:key`; a key may contain slashes."""

    @extend_schema(
        operation_id="nodes_labels_remove",
        summary="Remove a label",
        tags=["nodes"],
        parameters=[LABEL_KEY, REVISION],
        responses={204: None, **refusals(400, 401, 403, 404, 409)},
    )
    def delete(self, request: Request, node_id: str, key: str) -> Response:
        """Succeeds also if the node does not have the label."""
        services.remove_label(existing(node_id), key, **edit_of(request))
        return Response(status=204)
