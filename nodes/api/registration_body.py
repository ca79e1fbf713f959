"""The body of a registration (`contract/http-api.md` §1.1).

`RegistrationSerializer` reads a body: JSON types and numbers that can be stored. What follows upon a right
token is checked by `registration`, in the order of §1.1. Unknown fields are ignored.
"""

import re
from collections.abc import Mapping
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from localai_cluster.kit import errors, names
from localai_cluster.kit.addresses import EXPECTED
from localai_cluster.web.rest import Described, NullIsAbsent, Text, Whole
from nodes.models import NodeType
from nodes.registry import gpus
from nodes.registry.heartbeats import LARGEST
from nodes.registry.labels import LONGEST_VALUE, MOST_LABELS
from nodes.registry.overrides import LARGEST_CAP
from nodes.registry.services import Registration, Running

LENGTHS = {
    "name": names.LONGEST_NAME,
    "address": 512,
    "http_address": 512,
    "gpu_vendor": 32,
    "gpu_compute_capability": 16,
    "capability": 64,
    "vram_budget": 32,
    "version": 64,
}
"""Most characters of the texts a worker tells; those of §1.1 come first."""
MOST_PROCESSES = 1024
LONGEST_PROCESS_KEY = 300
_ENGINE_TOKEN = re.compile(r"([0-9a-f]{64})?\Z")
_ANY_LENGTH = 2**20
"""Bodies are bounded; `registration` knows the real limits, because the token comes before them."""


def _bytes() -> Whole:
    return Whole(required=False, allow_null=True, min_value=0, max_value=LARGEST)


def _text() -> Text:
    return Text(required=False, allow_null=True, max_length=_ANY_LENGTH)


class _Labels(serializers.DictField):
    """Texts by text, counted before they are read."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """The labels; the services know what each may be."""
        if isinstance(data, dict) and len(data) > MOST_LABELS:
            raise serializers.ValidationError(f"must be at most {MOST_LABELS} labels")
        labels: dict[str, Any] = super().to_internal_value(data)
        return labels


@extend_schema_field(OpenApiTypes.ANY)
class _Told(serializers.Field[Any, Any, Any, Any]):
    """Anything; `registration` reads it, and `described` says what it may be."""

    def to_internal_value(self, data: Any) -> Any:
        """As it came."""
        return data


class RunningProcessSerializer(NullIsAbsent):
    """One engine process of the worker: `model#replica`, and where it listens if that is known."""

    process_key = Text(max_length=_ANY_LENGTH)
    address = _text()


REGISTRATION = {
    "name": "w1",
    "address": "127.0.0.1:51100",
    "http_address": "127.0.0.1:51099",
    "token": "tok",
    "total_vram": 0,
    "available_vram": 0,
    "total_ram": 25276502016,
    "available_ram": 24659845120,
    "total_disk": 270553174016,
    "available_disk": 81634766848,
    "gpu_vendor": "",
    "gpu_compute_capability": "",
    "capability": "default",
    "max_replicas_per_model": 1,
    "labels": {"node.replica-slots": "1", "tier": "t1"},
}


@extend_schema_serializer(
    examples=[
        OpenApiExample("A worker without a GPU", REGISTRATION, request_only=True),
        OpenApiExample(
            "Our worker, with what it runs",
            REGISTRATION
            | {
                "version": "0.1.0",
                "running_processes": [{"process_key": "qwen3#0", "address": "127.0.0.1:51101"}],
            },
            request_only=True,
        ),
        OpenApiExample(
            "An agent", {"name": "agent-1", "node_type": "agent", "token": "tok"}, request_only=True
        ),
    ]
)
class RegistrationSerializer(Described, NullIsAbsent):
    """What a worker says of itself; sizes in bytes."""

    name, node_type, address, http_address, token = _text(), _text(), _text(), _text(), _text()
    total_vram, available_vram = _bytes(), _bytes()
    total_ram, available_ram = _bytes(), _bytes()
    total_disk, available_disk = _bytes(), _bytes()
    gpu_vendor, gpu_compute_capability, capability, vram_budget = _text(), _text(), _text(), _text()
    engine_token, version = _text(), _text()
    gpus = _Told(required=False, allow_null=True)
    labels = _Labels(child=Text(max_length=_ANY_LENGTH), required=False, allow_null=True)
    max_replicas_per_model = Whole(required=False, allow_null=True, min_value=-(2**63), max_value=LARGEST_CAP)
    running_processes: serializers.ListSerializer[Any] = serializers.ListSerializer(
        child=RunningProcessSerializer(), required=False, allow_null=True, max_length=MOST_PROCESSES
    )

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With what `check` and the services check."""
        properties = schema["properties"]
        for name, longest in LENGTHS.items():
            properties[name]["maxLength"] = longest
        properties["address"]["description"] = f"Where its engines are reached, {EXPECTED}."
        properties["http_address"]["description"] = (
            "The same for its probes; its host is that of `address`, or one of CLUSTER_NODE_HOSTS."
        )
        properties["engine_token"] |= {
            "pattern": "^([0-9a-f]{64})?$",
            "description": "What its engines expect as a bearer. Empty: they expect the registration token.",
        }
        for name in ("name", "token"):
            properties[name]["minLength"] = 1
            del properties[name]["nullable"]
        properties["node_type"] |= {"maxLength": 16, "pattern": f"^({'|'.join(NodeType.values)})?$"}
        properties["labels"] |= {
            "maxProperties": MOST_LABELS,
            "additionalProperties": {"type": "string", "maxLength": LONGEST_VALUE},
        }
        properties["gpus"] = gpus.SCHEMA
        properties["running_processes"] |= {
            "maxItems": MOST_PROCESSES,
            "description": "The engine processes that run. Absent: none is known to run, all replicas go.",
        }
        return schema | {"required": ["name", "token"]}


def registration(fields: Mapping[str, Any]) -> Registration:
    """What a validated body says, checked in the order of §1.1; raises InvalidInput naming the field.

    What characters names and labels may have is the services' to say.
    """
    told = dict(fields) | {"node_type": fields.get("node_type") or NodeType.BACKEND.value}
    _check_presence(told)
    for field, longest in LENGTHS.items():
        _check_text(told.get(field, ""), field, longest)
    if not _ENGINE_TOKEN.match(told.get("engine_token", "")):
        raise errors.InvalidInput("engine_token must be 64 lower-case hex digits", field="engine_token")
    told["gpus"] = gpus.read(told.get("gpus")) or []
    if (running := told.get("running_processes")) is not None:
        told["running_processes"] = [_process(one, number) for number, one in enumerate(running)]
    return Registration(**told)


def _check_presence(told: Mapping[str, Any]) -> None:
    if told["node_type"] not in NodeType.values:
        raise errors.InvalidInput('node_type must be "backend" or "agent"', field="node_type")
    if not told.get("name", "").strip():
        raise errors.InvalidInput("name is required", field="name")
    if told["node_type"] == NodeType.BACKEND and not told.get("address", "").strip():
        raise errors.InvalidInput("address is required for a backend node", field="address")


def _check_text(text: str, field: str, longest: int) -> None:
    _check_length(text, field, longest)
    names.check_text(text, field)


def _check_length(text: str, field: str, longest: int) -> None:
    if len(text) > longest:
        raise errors.InvalidInput(f"{field} exceeds {longest} characters", field=field)


def _process(told: Mapping[str, Any], number: int) -> Running:
    """Keys and addresses are only compared, so any characters will do: a model may have any name."""
    field = f"running_processes.{number}"
    if not told["process_key"]:
        raise errors.InvalidInput(f"{field}.process_key is required", field=field)
    _check_length(told["process_key"], f"{field}.process_key", LONGEST_PROCESS_KEY)
    _check_length(told.get("address", ""), f"{field}.address", LENGTHS["address"])
    return Running(**told)
