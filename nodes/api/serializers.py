"""JSON shapes of the registry: what comes in is bounded and named, what goes out follows the presence rules.

Field names and rules are those of `contract/http-api.md` §2.3, §2.10. Unknown fields are ignored.
"""

import json
import re
from typing import Any
from urllib.parse import urlsplit

from rest_framework import serializers

from localai_cluster.web.fields import Described, NullIsAbsent, Text
from nodes.models import NodeModel, ReplicaState

_REPLICA_OMITTED_IF_EMPTY = (
    "loading_by",
    "backend_type",
    "config_revision",
    "effective_options_hash",
    "cleanup_error",
    "cleanup_attempts",
    "cleanup_next_retry_at",
)
_BACKEND_NAME = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*"


def _text(length: int) -> Text:
    return Text(required=False, allow_null=True, max_length=length)


class _OmitsEmpty(Described):
    """Leaves the named keys out when they are empty (§0.5)."""

    omitted_if_empty: tuple[str, ...] = ()

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """Every key is there but those."""
        return schema | {"required": sorted(set(schema["properties"]) - set(cls.omitted_if_empty))}

    def to_representation(self, instance: Any) -> dict[str, Any]:
        """The object without its empty optional keys."""
        shown: dict[str, Any] = super().to_representation(instance)  # type: ignore[misc]
        for name in self.omitted_if_empty:
            if not shown[name]:
                del shown[name]
        return shown


class ReplicaSerializer(_OmitsEmpty, serializers.ModelSerializer[NodeModel]):
    """One replica (§2.3)."""

    omitted_if_empty = _REPLICA_OMITTED_IF_EMPTY

    node_id = serializers.UUIDField(read_only=True)
    state = serializers.ChoiceField(choices=ReplicaState.choices)

    class Meta:
        model = NodeModel
        fields = (
            "id",
            "node_id",
            "model_name",
            "replica_index",
            "address",
            "state",
            "in_flight",
            "last_used",
            *_REPLICA_OMITTED_IF_EMPTY,
            "created_at",
            "updated_at",
        )


class InstallSerializer(Described, NullIsAbsent):
    """What to install on a node (§2.10)."""

    backend = _text(255)
    uri = _text(1024)
    name = _text(255)
    alias = _text(255)
    backend_galleries = _text(64 * 1024)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of names, and that one of three must be there."""
        for name in ("backend", "name", "alias"):
            schema["properties"][name]["pattern"] = f"^({_BACKEND_NAME})?$"
        return schema | {"anyOf": [{"required": [name]} for name in ("backend", "name", "uri")]}

    def validate_backend(self, value: str | None) -> str | None:
        """A gallery's name, with an optional `gallery@` before it."""
        return _checked_name(value)

    validate_name = validate_backend
    validate_alias = validate_backend

    def validate_uri(self, value: str | None) -> str | None:
        """An address without control characters, and without a password: operations show it."""
        if value and not value.isprintable():
            raise serializers.ValidationError("must not contain control characters")
        if value and "@" in _authority(value):
            raise serializers.ValidationError("must not contain a user or password")
        return value

    def validate_backend_galleries(self, value: str | None) -> str:
        """O37: anything but a list with galleries in it means the configured ones."""
        try:
            galleries = json.loads(value or "[]")
        except (ValueError, RecursionError):
            return ""
        return value or "" if isinstance(galleries, list) and galleries else ""


def _authority(uri: str) -> str:
    try:
        return urlsplit(uri).netloc
    except ValueError:
        raise serializers.ValidationError("must be an address") from None


def _checked_name(value: str | None) -> str | None:
    if value and not re.fullmatch(_BACKEND_NAME, value, re.ASCII):
        raise serializers.ValidationError(
            "must be letters, digits, dots, dashes and underscores, with an optional gallery@ before it"
        )
    return value


class AcceptedSerializer(serializers.Serializer[Any]):
    """An operation was admitted; `statusUrl` tells how it goes."""

    jobID = serializers.UUIDField()
    statusUrl = serializers.CharField()
    message = serializers.CharField()
    deduplicated = serializers.BooleanField(required=False)
