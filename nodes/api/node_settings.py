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
from nodes.api.base import REVISION, NodeView, Schema, edit_arguments, require_node_id
from nodes.models import NodeLabel, scheduling
from nodes.registry import overrides
from nodes.registry.labels import edit_labels
from nodes.registry.overrides import MAX_BUDGET_LENGTH, MAX_CAP

LABEL_KEY = OpenApiParameter(
    "key",
    {"type": "string", "minLength": 1},
    OpenApiParameter.PATH,
    description="The label's key; everything after `labels/`, slashes too.",
)
LABELS: Schema = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {"type": "string", "maxLength": scheduling.MAX_VALUE_LENGTH},
    "description": "Key to value; keys have 1 to 128 characters.",
}
_LABELS = {(200, "application/json"): LABELS}
_EXAMPLE = {"gpu.vendor": "nvidia", "node.name": "gpu-a", "node.replica-slots": "2"}
CAP = Shape("Cap", "The cap that holds now.", [field("max_replicas_per_model", count(1))])
BUDGET = Shape("Budget", "The budget as sent.", [field("vram_budget", TEXT)])
QUOTA = Shape("DiskQuota", "The quota as sent.", [field("disk_quota", TEXT)])
RESET = Shape("Reset", "The override is handed back.", [field("reset", FLAG)])


_describe_edit = partial(describe, refused=(400, 404, 409, 413), parameters=[REVISION])
_describe_labels = partial(
    _describe_edit, body={"application/json": LABELS}, others=_LABELS, sent={"tier": "fast"}, shown=_EXAMPLE
)
_describe_reset = partial(
    describe, answer=RESET, refused=(400, 404, 409), parameters=[REVISION], shown={"reset": True}
)


def _describe_value(
    name: str, summary: str, body: type[NullIsAbsent], answer: Shape, value: Any
) -> Callable[[View], View]:
    """Describe a route that sets one value, for the API document."""
    (key,) = answer.fields
    return _describe_edit(name, summary, answer, body=body, sent={"value": value}, shown={key: value})


class LabelsView(NodeView):
    """`/api/nodes/:id/labels`."""

    @describe("nodes_labels", "List a node's labels", others=_LABELS, refused=(404,), shown=_EXAMPLE)
    def get(self, request: Request, node_id: str) -> Response:
        """Key to value."""
        rows = NodeLabel.objects.filter(node=require_node_id(node_id)).order_by("key")
        return Response(dict(rows.values_list("key", "value")))

    @_describe_labels("nodes_labels_replace", "Replace a node's labels")
    def put(self, request: Request, node_id: str) -> Response:
        """Replaces all labels; automatic ones return when the worker registers again."""
        parsed_id = require_node_id(node_id)
        return Response(edit_labels(parsed_id, parse_labels(request), drop=None, **edit_arguments(request)))

    @_describe_labels("nodes_labels_merge", "Add or change labels")
    def patch(self, request: Request, node_id: str) -> Response:
        """Other labels stay; the answer has all of them."""
        parsed_id = require_node_id(node_id)
        return Response(edit_labels(parsed_id, parse_labels(request), **edit_arguments(request)))


def parse_labels(request: Request) -> dict[str, str]:
    """Return the labels in the body. Raise InvalidInput with the key whose value is not a text."""
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
        parameters=[LABEL_KEY, REVISION],
    )
    def delete(self, request: Request, node_id: str, key: str) -> Response:
        """Succeeds also if the node does not have the label."""
        edit_labels(require_node_id(node_id), {}, drop=(key,), **edit_arguments(request))
        return Response(status=204)


class CapRequestSerializer(NullIsAbsent):
    """At most so many replicas of one model."""

    value = Whole(min_value=1, max_value=MAX_CAP)


class BudgetRequestSerializer(NullIsAbsent):
    """`80%`, `0.8`, `16GB`, `15GiB`, bytes; an empty text means no cap and is as sticky as any other."""

    value = Text(max_length=MAX_BUDGET_LENGTH)


class ReplicaCapView(NodeView):
    """`/api/nodes/:id/max-replicas-per-model`."""

    @_describe_value("nodes_cap", "Set the maximum replicas per model", CapRequestSerializer, CAP, 3)
    def put(self, request: Request, node_id: str) -> Response:
        """Overrides the worker's own value (R1.45)."""
        parsed_id = require_node_id(node_id)
        value = validate_body(CapRequestSerializer, request)["value"]
        node = overrides.set_replica_cap(parsed_id, value, **edit_arguments(request))
        return Response(CAP.of(max_replicas_per_model=node.max_replicas_per_model))

    @_describe_reset("nodes_cap_reset", "Reset the maximum replicas per model")
    def delete(self, request: Request, node_id: str) -> Response:
        """The worker's own value applies again from its next registration (R1.46)."""
        overrides.reset_replica_cap(require_node_id(node_id), **edit_arguments(request))
        return Response(RESET.of(reset=True))


class VramBudgetView(NodeView):
    """`/api/nodes/:id/vram-budget`."""

    @_describe_value("nodes_budget", "Set the VRAM budget", BudgetRequestSerializer, BUDGET, "80%")
    def put(self, request: Request, node_id: str) -> Response:
        """Limits the node's VRAM against the worker's reports; an empty text means unlimited (R1.47)."""
        parsed_id = require_node_id(node_id)
        value = validate_body(BudgetRequestSerializer, request)["value"]
        overrides.set_vram_budget(parsed_id, value, **edit_arguments(request))
        return Response(BUDGET.of(vram_budget=value))

    @_describe_reset("nodes_budget_reset", "Reset the VRAM budget")
    def delete(self, request: Request, node_id: str) -> Response:
        """Unlimited until the worker registers with a budget (R1.48)."""
        overrides.reset_vram_budget(require_node_id(node_id), **edit_arguments(request))
        return Response(RESET.of(reset=True))


class DiskQuotaView(NodeView):
    """`/api/nodes/:id/disk-quota`, which the reference lacks."""

    @_describe_value(
        "nodes_disk_quota", "Set the disk quota for models", BudgetRequestSerializer, QUOTA, "200GB"
    )
    def put(self, request: Request, node_id: str) -> Response:
        """Limits the disk space of models' files; files that are there stay. An empty text: no limit."""
        parsed_id = require_node_id(node_id)
        value = validate_body(BudgetRequestSerializer, request)["value"]
        overrides.set_disk_quota(parsed_id, value, **edit_arguments(request))
        return Response(QUOTA.of(disk_quota=value))

    @_describe_reset("nodes_disk_quota_reset", "Remove the disk quota for models")
    def delete(self, request: Request, node_id: str) -> Response:
        """No limit but the free disk space."""
        overrides.set_disk_quota(require_node_id(node_id), "", **edit_arguments(request))
        return Response(RESET.of(reset=True))
