"""Settings of a node: labels, replica cap, VRAM budget, disk quota (`contract/http-api.md` §2.7 to §2.9)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import errors, names
from localai_cluster.web.openapi import View, describe
from localai_cluster.web.rest import NullIsAbsent, Text, Whole, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, Shape, count, field
from localai_cluster.web.wire import MALFORMED_MESSAGE
from nodes.api.base import REVISION_PARAMETER, NodeView, Schema, parse_edit_arguments, require_node_id
from nodes.models import NodeLabel, scheduling
from nodes.registry import overrides
from nodes.registry.labels import edit_labels
from nodes.registry.overrides import MAX_BUDGET_LENGTH, MAX_REPLICA_CAP

LABEL_KEY_PARAMETER = OpenApiParameter(
    "key",
    {"type": "string", "minLength": 1},
    OpenApiParameter.PATH,
    description="The label's key; everything after `labels/`, slashes too.",
)
LABELS_SCHEMA: Schema = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {"type": "string", "maxLength": scheduling.MAX_VALUE_LENGTH},
    "description": "Key to value; keys have 1 to 128 characters.",
}
_LABELS_RESPONSES = {(200, "application/json"): LABELS_SCHEMA}
_LABELS_EXAMPLE = {"gpu.vendor": "nvidia", "node.name": "gpu-a", "node.replica-slots": "2"}
CAP_SHAPE = Shape("Cap", "The cap that holds now.", [field("max_replicas_per_model", count(1), example=3)])
BUDGET_SHAPE = Shape("Budget", "The budget as sent.", [field("vram_budget", TEXT, example="80%")])
QUOTA_SHAPE = Shape("DiskQuota", "The quota as sent.", [field("disk_quota", TEXT, example="200GB")])
RESET_SHAPE = Shape("Reset", "The override is handed back.", [field("reset", FLAG, example=True)])


_describe_edit = partial(describe, refused=(400, 404, 409, 413), parameters=[REVISION_PARAMETER])
_describe_labels = partial(
    _describe_edit,
    body={"application/json": LABELS_SCHEMA},
    others=_LABELS_RESPONSES,
    sent={"tier": "fast"},
    shown=_LABELS_EXAMPLE,
)
_describe_reset = partial(
    describe, answer=RESET_SHAPE, refused=(400, 404, 409), parameters=[REVISION_PARAMETER]
)


def _describe_value(
    name: str, summary: str, body: type[NullIsAbsent], answer: Shape
) -> Callable[[View], View]:
    """Describe a route that sets one value of a node, for the API document."""
    (value,) = answer.example.values()
    return _describe_edit(name, summary, answer, body=body, sent={"value": value})


class LabelsView(NodeView):
    """`/api/nodes/:id/labels`."""

    @describe(
        "nodes_labels",
        "List a node's labels",
        others=_LABELS_RESPONSES,
        refused=(404,),
        shown=_LABELS_EXAMPLE,
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the labels of the node as an object of keys and values."""
        rows = NodeLabel.objects.filter(node=require_node_id(node_id)).order_by("key")
        return Response(dict(rows.values_list("key", "value")))

    @_describe_labels("nodes_labels_replace", "Replace a node's labels")
    def put(self, request: Request, node_id: str) -> Response:
        """Replaces all labels. The registry's own labels return when the worker registers again."""
        parsed_id = require_node_id(node_id)
        return Response(
            edit_labels(parsed_id, parse_labels(request), drop=None, **parse_edit_arguments(request))
        )

    @_describe_labels("nodes_labels_merge", "Add or change labels")
    def patch(self, request: Request, node_id: str) -> Response:
        """Sets these labels and keeps all others; the response has the complete set."""
        parsed_id = require_node_id(node_id)
        return Response(edit_labels(parsed_id, parse_labels(request), **parse_edit_arguments(request)))


def parse_labels(request: Request) -> dict[str, str]:
    """Return the labels in the body. Raise InvalidInput with the key of a value that is no text."""
    if not isinstance(request.data, dict):
        raise errors.InvalidInput(MALFORMED_MESSAGE)
    for key, value in request.data.items():
        if not isinstance(value, str):
            names.check_text(key, "labels: a key")
            raise errors.InvalidInput(f"labels.{key[:128]}: must be a string", field=f"labels.{key[:128]}")
    labels: dict[str, Any] = request.data
    return labels


class LabelView(NodeView):
    """`/api/nodes/:id/labels/:key`; a key may contain slashes."""

    @describe(
        "nodes_labels_remove",
        "Remove a label",
        status=204,
        refused=(400, 404, 409),
        parameters=[LABEL_KEY_PARAMETER, REVISION_PARAMETER],
    )
    def delete(self, request: Request, node_id: str, key: str) -> Response:
        """Removes the label; it is a success if the node does not have it."""
        edit_labels(require_node_id(node_id), {}, drop=(key,), **parse_edit_arguments(request))
        return Response(status=204)


class CapRequestSerializer(NullIsAbsent):
    """The maximum number of replicas of one model on the node."""

    value = Whole(min_value=1, max_value=MAX_REPLICA_CAP)


class BudgetRequestSerializer(NullIsAbsent):
    """A limit as `80%`, `0.8`, `16GB`, `15GiB` or bytes.

    An empty text means no limit, and also overrides the worker.
    """

    value = Text(max_length=MAX_BUDGET_LENGTH)


class ReplicaCapView(NodeView):
    """`/api/nodes/:id/max-replicas-per-model`."""

    @_describe_value("nodes_cap", "Set the maximum replicas per model", CapRequestSerializer, CAP_SHAPE)
    def put(self, request: Request, node_id: str) -> Response:
        """Overrides the worker's own value (R1.45)."""
        parsed_id = require_node_id(node_id)
        value = validate_body(CapRequestSerializer, request)["value"]
        node = overrides.set_replica_cap(parsed_id, value, **parse_edit_arguments(request))
        return Response(CAP_SHAPE.of(max_replicas_per_model=node.max_replicas_per_model))

    @_describe_reset("nodes_cap_reset", "Reset the maximum replicas per model")
    def delete(self, request: Request, node_id: str) -> Response:
        """Removes the override; the worker's own value applies from its next registration (R1.46)."""
        overrides.reset_replica_cap(require_node_id(node_id), **parse_edit_arguments(request))
        return Response(RESET_SHAPE.of(reset=True))


class VramBudgetView(NodeView):
    """`/api/nodes/:id/vram-budget`."""

    @_describe_value("nodes_budget", "Set the VRAM budget", BudgetRequestSerializer, BUDGET_SHAPE)
    def put(self, request: Request, node_id: str) -> Response:
        """Limits the node's VRAM, whatever its worker reports; an empty text means unlimited (R1.47)."""
        parsed_id = require_node_id(node_id)
        value = validate_body(BudgetRequestSerializer, request)["value"]
        overrides.set_vram_budget(parsed_id, value, **parse_edit_arguments(request))
        return Response(BUDGET_SHAPE.of(vram_budget=value))

    @_describe_reset("nodes_budget_reset", "Reset the VRAM budget")
    def delete(self, request: Request, node_id: str) -> Response:
        """Removes the limit until the worker registers with a budget (R1.48)."""
        overrides.reset_vram_budget(require_node_id(node_id), **parse_edit_arguments(request))
        return Response(RESET_SHAPE.of(reset=True))


class DiskQuotaView(NodeView):
    """`/api/nodes/:id/disk-quota`, which the reference lacks."""

    @_describe_value(
        "nodes_disk_quota", "Set the disk quota for models", BudgetRequestSerializer, QUOTA_SHAPE
    )
    def put(self, request: Request, node_id: str) -> Response:
        """Limits the disk space of models' files; existing files stay. An empty text means no limit."""
        parsed_id = require_node_id(node_id)
        value = validate_body(BudgetRequestSerializer, request)["value"]
        overrides.set_disk_quota(parsed_id, value, **parse_edit_arguments(request))
        return Response(QUOTA_SHAPE.of(disk_quota=value))

    @_describe_reset("nodes_disk_quota_reset", "Remove the disk quota for models")
    def delete(self, request: Request, node_id: str) -> Response:
        """Removes the quota; only the free disk space limits the files."""
        overrides.set_disk_quota(require_node_id(node_id), "", **parse_edit_arguments(request))
        return Response(RESET_SHAPE.of(reset=True))
