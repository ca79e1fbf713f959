"""What admins send and get beside the nodes themselves: reasons, overrides, conflicts, events."""

import re
from typing import Any
from uuid import UUID

from rest_framework import serializers

from localai_cluster import names
from localai_cluster.web.fields import Described, NullIsAbsent, Strict, Text, Whole
from nodes.models import NodeConflict, NodeEvent, NodeStatus
from nodes.registry import services
from nodes.registry.overrides import LARGEST_CAP, LONGEST_BUDGET

LONGEST_REASON = 255
MOST_IDS = 500
_FINGERPRINT = re.compile("^([0-9a-fA-F]{64})?$")
_NO_NULL = "^[^\\u0000]*$"


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


class OutcomeSerializer(serializers.Serializer[Any]):
    """What became of one of them; `name` and `status` if it worked, otherwise `error`."""

    id = serializers.UUIDField()
    name = serializers.CharField(required=False)
    status = serializers.ChoiceField(choices=NodeStatus.choices, required=False)
    api_token = serializers.CharField(required=False, help_text="An agent's, shown this once.")
    error = serializers.CharField(required=False)


class OutcomesSerializer(serializers.Serializer[Any]):
    """How many were approved, and each in the order asked for."""

    approved = serializers.IntegerField(min_value=0)
    results = OutcomeSerializer(many=True)


class CapRequestSerializer(NullIsAbsent):
    """At most so many replicas of one model."""

    value = Whole(min_value=1, max_value=LARGEST_CAP)


class CapSerializer(serializers.Serializer[Any]):
    """The cap that holds now."""

    max_replicas_per_model = serializers.IntegerField(min_value=1)


class BudgetRequestSerializer(NullIsAbsent):
    """`80%`, `0.8`, `16GB`, `15GiB`, bytes; an empty text means no cap and is as sticky as any other."""

    value = Text(max_length=LONGEST_BUDGET)


class BudgetSerializer(serializers.Serializer[Any]):
    """The budget as sent."""

    vram_budget = serializers.CharField(allow_blank=True)


class ResetSerializer(serializers.Serializer[Any]):
    """The override is handed back."""

    reset = serializers.BooleanField()


class ConflictSerializer(serializers.Serializer[Any]):
    """Somebody else claims to be a node."""

    id = serializers.UUIDField()
    node_id = serializers.UUIDField()
    node_name = serializers.CharField()
    kind = serializers.ChoiceField(choices=NodeConflict.Mismatch.choices)
    state = serializers.ChoiceField(choices=NodeConflict.State.choices)
    fingerprint = serializers.CharField(required=False, help_text="Of the secret that was offered.")
    instance = serializers.CharField(required=False, help_text="The process that called.")
    claimed_name = serializers.CharField(required=False)
    source_address = serializers.CharField(allow_blank=True, help_text="Where the claim came from.")
    advertised_address = serializers.CharField(required=False)
    node_source_address = serializers.CharField(allow_blank=True, help_text="Where the node itself was seen.")
    count = serializers.IntegerField(min_value=1)
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    decided_at = serializers.DateTimeField(required=False)
    decided_by = serializers.CharField(required=False)


class EventSerializer(serializers.Serializer[Any]):
    """One thing that happened to a node."""

    id = serializers.IntegerField(min_value=1)
    node_id = serializers.UUIDField()
    node_name = serializers.CharField()
    kind = serializers.ChoiceField(choices=NodeEvent.Kind.choices)
    at = serializers.DateTimeField()
    last_at = serializers.DateTimeField(help_text="Repeated conflicts of one minute are one event.")
    count = serializers.IntegerField(min_value=1)
    actor_kind = serializers.CharField()
    actor = serializers.CharField(allow_blank=True)
    cause = serializers.CharField(allow_blank=True)
    status_before = serializers.CharField(allow_blank=True)
    status_after = serializers.CharField(allow_blank=True)
    detail = serializers.DictField(required=False)
    request_id = serializers.CharField(required=False)


class EventsSerializer(serializers.Serializer[Any]):
    """A page of the timeline, newest first; `next_cursor` leads to the older ones, if there are any."""

    events = EventSerializer(many=True)
    next_cursor = serializers.IntegerField(required=False)
