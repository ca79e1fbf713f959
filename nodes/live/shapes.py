"""The messages of `/ws/feed` for the API document, from which the pages' types are made.

Serializers say what `rows.py`, `notices.py` and the feed of operations make; every key of a node is
always there, and a patch is a node of which only the id must be. Websocket messages are no operation of a
route, so `components` makes their schemas for the document's hook.
"""

from functools import cache
from typing import Any

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ComponentRegistry
from rest_framework import serializers
from rest_framework.views import APIView

from localai_cluster.web.fields import Described
from nodes.api.node_shapes import FactSerializer
from nodes.models import NodeStatus, NodeType, ReplicaState
from nodes.registry.heartbeats import LARGEST
from operations.api.serializers import OperationSerializer

Schema = dict[str, Any]
Serializer = serializers.Serializer[Any]


def _text(meaning: str = "") -> serializers.CharField:
    return serializers.CharField(allow_blank=True, help_text=meaning or None)


def _bytes() -> serializers.IntegerField:
    return serializers.IntegerField(min_value=0, max_value=LARGEST)


def _count(meaning: str = "") -> serializers.IntegerField:
    return serializers.IntegerField(min_value=0, help_text=meaning or None)


def _when(meaning: str = "") -> serializers.DateTimeField:
    return serializers.DateTimeField(allow_null=True, help_text=meaning or None)


class LiveModelSerializer(Serializer):
    """One replica on a node, in any state."""

    id = serializers.UUIDField()
    model_name = serializers.CharField()
    replica_index = _count()
    state = serializers.ChoiceField(choices=ReplicaState.choices)
    in_flight = _count("Requests that run on it.")
    backend_type = _text()
    last_used = serializers.DateTimeField()


class LiveDrainSerializer(Serializer):
    """A drain; what remains of it is in the node's replicas."""

    since = serializers.DateTimeField()
    by = _text()
    reason = _text()
    own = serializers.BooleanField(help_text="Its worker drained it; the next registration ends that.")
    deadline = _when("When the replicas go in any case.")
    engines_gone_at = _when("When its worker said that no engine runs there: it is safe to power off.")
    engines_error = _text("Why it cannot be confirmed that its engines have stopped.")


class LiveNodeSerializer(Serializer):
    """One node as pages show it: every key is always there, empty rather than absent."""

    id = serializers.UUIDField()
    name = serializers.CharField()
    node_type = serializers.ChoiceField(choices=NodeType.choices)
    status = serializers.ChoiceField(choices=NodeStatus.choices)
    reason = _text("Why it has its status; empty for a healthy one.")
    since = _when("Since when it has its status; null for a healthy one.")
    address = _text("gRPC host:port; empty for agents.")
    http_address = _text()
    gpu_vendor = _text()
    gpu_compute_capability = _text()
    capability = _text()
    total_vram = _bytes()
    available_vram = _bytes()
    reserved_vram = _bytes()
    vram_budget = _text("As it was typed.")
    vram_budget_bytes = _bytes()
    vram_budget_manually_set = serializers.BooleanField()
    total_ram = _bytes()
    available_ram = _bytes()
    total_disk = _bytes()
    available_disk = _bytes()
    max_replicas_per_model = serializers.IntegerField(min_value=1)
    max_replicas_per_model_manually_set = serializers.BooleanField()
    last_heartbeat = _when()
    created_at = serializers.DateTimeField(help_text="First seen.")
    labels = serializers.DictField(child=_text())
    models = LiveModelSerializer(many=True)
    model_count = _count("Loaded replicas.")
    in_flight_count = _count("Requests on loaded and unloading replicas.")
    backends = serializers.ListField(child=serializers.CharField(), help_text="Names of what is installed.")
    inventory_at = _when("As of when `backends` is what the worker listed; null if it was never asked.")
    weak_identity = serializers.BooleanField(help_text="Known by the shared token only.")
    fingerprint = _text("SHA-256 of the worker's own secret.")
    source_address = _text("Where it registered from.")
    rejected = FactSerializer(allow_null=True)
    revoked = FactSerializer(allow_null=True)
    drain = LiveDrainSerializer(allow_null=True)
    open_conflicts = _count("Identity conflicts that wait for a decision.")
    rotation_requested_at = _when()
    revision = _count("Moves with every change but heartbeats.")


class LiveNodePatchSerializer(Described, LiveNodeSerializer):
    """What changed in a node: its id and the keys that have another value now; all of them if it is new."""

    @classmethod
    def described(cls, schema: Schema) -> Schema:
        """Only the id must be there."""
        return schema | {"required": ["id"]}


class NoticeSerializer(Serializer):
    """Something that an operator should know, whatever page is open."""

    id = serializers.CharField(help_text="Stays the same while it holds.")
    level = serializers.ChoiceField(choices=["warning", "error"])
    text = serializers.CharField()
    hint = serializers.CharField(help_text="What to do about it; names the setting or the page.")


class FeedUserSerializer(Serializer):
    """Whom the server takes the client for."""

    name = serializers.CharField()
    role = serializers.ChoiceField(choices=["admin"])


class Message(Described, Serializer):
    """A message; `type` tells which."""

    type_is = ""

    @classmethod
    def described(cls, schema: Schema) -> Schema:
        """With its one type."""
        kind = {"type": "string", "enum": [cls.type_is]}
        required = ["type", *schema.get("required", [])]
        return schema | {"properties": {"type": kind, **schema["properties"]}, "required": required}


class FeedHelloSerializer(Message):
    """The first message."""

    type_is = "hello"
    at = serializers.DateTimeField()
    build = _text("The hash of the built pages; a page with another one is out of date.")
    version = serializers.CharField()
    user = FeedUserSerializer()


class FeedOperationsSnapshotSerializer(Message):
    """The live list as it is: whatever is not in it has ended or was dismissed."""

    type_is = "operations.snapshot"
    seq = _count("Where the reader stands.")
    operations = OperationSerializer(many=True)


class FeedOperationsDeltaSerializer(Message):
    """Operations that changed, in the order of their last change; ended and dismissed ones too."""

    type_is = "operations.delta"
    seq = _count("Where the reader stands afterwards.")
    operations = OperationSerializer(many=True)


class FeedNodesSnapshotSerializer(Message):
    """All nodes as they are, by name."""

    type_is = "nodes.snapshot"
    cursor = serializers.CharField(help_text="Where the reader stands.")
    nodes = LiveNodeSerializer(many=True)


class FeedNodesDeltaSerializer(Message):
    """What changed since the last message about nodes."""

    type_is = "nodes.delta"
    cursor = serializers.CharField(help_text="Where the reader stands afterwards.")
    changed = LiveNodePatchSerializer(many=True)
    removed = serializers.ListField(child=serializers.UUIDField())


class FeedNoticesSerializer(Message):
    """All notices that hold, the worst first; the list before is void."""

    type_is = "notices"
    notices = NoticeSerializer(many=True)


class FeedAliveSerializer(Message):
    """A sign of life, every five seconds."""

    type_is = "alive"
    at = serializers.DateTimeField()


MESSAGES: tuple[type[Message], ...] = (
    FeedHelloSerializer,
    FeedOperationsSnapshotSerializer,
    FeedOperationsDeltaSerializer,
    FeedNodesSnapshotSerializer,
    FeedNodesDeltaSerializer,
    FeedNoticesSerializer,
    FeedAliveSerializer,
)


@cache
def components() -> dict[str, Schema]:
    """The schemas of all messages, of what is in them, and `FeedMessage`, which is any of them."""
    schema: Any = AutoSchema()
    schema.registry = ComponentRegistry()
    schema.path, schema.method, schema.view = "/ws/feed", "GET", APIView(request=None)
    references = {one.type_is: schema.resolve_serializer(one, "response").ref for one in MESSAGES}
    found: dict[str, Schema] = schema.registry.build({})["schemas"]
    for one in found.values():
        for field in one["properties"].values():
            field.pop("x-spec-enum-id", None)  # for a hook that has run already
    any_of_them = {
        "oneOf": list(references.values()),
        "discriminator": {
            "propertyName": "type",
            "mapping": {kind: reference["$ref"] for kind, reference in references.items()},
        },
    }
    return found | {"FeedMessage": any_of_them}
