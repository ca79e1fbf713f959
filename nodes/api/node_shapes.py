"""Nodes for the API document: what `node_rows.py` makes (`contract/http-api.md` §2.1, §2.3).

These shapes describe and are not run: a field that may be absent says `required=False`.
"""

from typing import Any

from rest_framework import serializers

from localai_cluster.web.fields import Described
from nodes.models import NodeLabel, NodeStatus, NodeType
from nodes.registry.heartbeats import LARGEST


def _bytes(meaning: str = "", **options: Any) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=0, max_value=LARGEST, help_text=meaning or None, **options)


def _text(meaning: str = "", **options: Any) -> serializers.CharField:
    return serializers.CharField(allow_blank=True, help_text=meaning or None, **options)


class FactSerializer(serializers.Serializer[Any]):
    """Since when something holds, who said so and why."""

    at = serializers.DateTimeField()
    by = _text()
    reason = _text()


class DrainSerializer(serializers.Serializer[Any]):
    """A drain, and what remains of it."""

    since = serializers.DateTimeField()
    by = _text()
    reason = _text()
    own = serializers.BooleanField(help_text="Its worker drained it; the next registration ends that.")
    in_flight = serializers.IntegerField(min_value=0, help_text="Requests that still run.")
    replicas = serializers.IntegerField(min_value=0, help_text="Replicas that are still there.")
    deadline = serializers.DateTimeField(required=False, help_text="When the replicas go in any case.")
    engines_gone_at = serializers.DateTimeField(
        required=False, help_text="When its worker said that no engine runs there: it is safe to power off."
    )
    engines_error = _text("Why it cannot be confirmed that its engines have stopped.", required=False)


class IdentitySerializer(serializers.Serializer[Any]):
    """Who the node proves to be."""

    weak = serializers.BooleanField(help_text="Known by the shared token only.")
    fingerprint = _text("SHA-256 of the worker's own secret.", required=False)
    source_address = _text("Where it registered from.", required=False)
    first_seen = serializers.DateTimeField()
    bound_at = serializers.DateTimeField(required=False, help_text="When a secret was first bound.")
    instance = _text("The worker process that speaks for the node.", required=False)
    rotation_requested_at = serializers.DateTimeField(required=False)
    open_conflicts = serializers.IntegerField(min_value=0)


class OverrideSerializer(serializers.Serializer[Any]):
    """Who said something instead of the worker, and when."""

    by = _text("Empty if the timeline does not know it any more.")
    at = serializers.DateTimeField(allow_null=True)


class OverridesSerializer(serializers.Serializer[Any]):
    """What an admin says instead of the worker."""

    max_replicas_per_model = OverrideSerializer(required=False)
    vram_budget = OverrideSerializer(required=False)


class InventorySerializer(serializers.Serializer[Any]):
    """As of when its list of backends is true."""

    at = serializers.DateTimeField(allow_null=True, help_text="Null if the worker never gave one.")
    error = _text("Why there is no newer one.")


class NodeSerializer(serializers.Serializer[Any]):
    """One node in the list (§2.1)."""

    id = serializers.UUIDField()
    name = serializers.CharField()
    node_type = serializers.ChoiceField(choices=NodeType.choices)
    address = _text("gRPC host:port; empty for agents.")
    http_address = _text()
    status = serializers.ChoiceField(choices=NodeStatus.choices)
    total_vram = _bytes()
    available_vram = _bytes("Never more than the budget.")
    reserved_vram = _bytes()
    total_ram = _bytes()
    available_ram = _bytes()
    total_disk = _bytes()
    available_disk = _bytes()
    gpu_vendor = _text()
    gpu_compute_capability = _text()
    capability = serializers.CharField(required=False)
    max_replicas_per_model = serializers.IntegerField(min_value=1, max_value=2**31 - 1)
    max_replicas_per_model_manually_set = serializers.BooleanField()
    vram_budget = serializers.CharField(required=False, help_text="As it was typed.")
    vram_budget_bytes = _bytes("The ceiling that the budget means.", required=False)
    vram_budget_manually_set = serializers.BooleanField()
    weak_identity = serializers.BooleanField(required=False, help_text="Known by the shared token only.")
    last_heartbeat = serializers.DateTimeField(help_text="The year-1 stamp if it was never heard.")
    created_at = serializers.DateTimeField()
    updated_at = serializers.DateTimeField()
    model_count = serializers.IntegerField(min_value=0, help_text="Loaded replicas.")
    in_flight_count = serializers.IntegerField(min_value=0)
    labels = serializers.DictField(child=_text(), required=False)
    rejected = FactSerializer(required=False, help_text="An admin's no; the status stays `pending`.")
    revoked = FactSerializer(required=False, help_text="Its secret was revoked; nobody is the node.")
    open_conflicts = serializers.IntegerField(min_value=1, required=False)


class NodeDetailSerializer(Described, NodeSerializer):
    """One node on its own (§2.3): `labels` is always there, and so is what lies behind the status."""

    approval = FactSerializer(required=False)
    offline = FactSerializer(required=False)
    unhealthy = FactSerializer(required=False)
    drain = DrainSerializer(required=False)
    identity = IdentitySerializer()
    revision = serializers.IntegerField(min_value=0, help_text="Moves with every change but heartbeats.")
    overrides = OverridesSerializer()
    label_sources = serializers.DictField(
        child=serializers.ChoiceField(choices=NodeLabel.Source.choices), help_text="Who set which label."
    )
    inventory = InventorySerializer()

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With labels even if there are none."""
        return schema | {"required": sorted({*schema["required"], "labels"})}


class NodeStateSerializer(serializers.Serializer[Any]):
    """Something was done to a node."""

    id = serializers.UUIDField()
    name = serializers.CharField()
    node_type = serializers.ChoiceField(choices=NodeType.choices)
    status = serializers.ChoiceField(choices=NodeStatus.choices)
    message = serializers.CharField()


class ApprovedSerializer(NodeStateSerializer):
    """The answer to an approval; an agent's token is shown this once."""

    api_token = serializers.CharField(required=False)
