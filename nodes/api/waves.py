"""Operations in waves: the options of a request, and the operator's choice after a failed wave."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts.authentication import principal
from localai_cluster.kit import clock
from localai_cluster.web.rest import NullIsAbsent, Text, Whole, validate_body
from nodes.backends import wave_requests
from nodes.backends.backend_requests import RequestScope
from nodes.backends.waves import Options
from operations.api.jobs import find_operation
from operations.api.serializers import MAX_NODES, OperationRoute
from operations.api.verbs import describe_verb

MAX_PAUSE_SECONDS = 86_400
"""Maximum pause between two waves, in seconds."""
_PERCENTAGE_PATTERN = "^([1-9][0-9]?|100)%$"


@extend_schema_field(
    {
        "oneOf": [
            {"type": "integer", "minimum": 1, "maximum": MAX_NODES},
            {"type": "string", "pattern": _PERCENTAGE_PATTERN},
        ],
    }
)
class NodesAtOnce(serializers.Field[int | str, Any, int | str, Any]):
    """A number of nodes, or a percentage of the request's nodes such as `25%`, rounded down."""

    def to_internal_value(self, data: Any) -> int | str:
        """Return the number or percentage unchanged. Raise ValidationError."""
        is_number = isinstance(data, int) and not isinstance(data, bool) and 1 <= data <= MAX_NODES
        if is_number or (isinstance(data, str) and re.fullmatch(_PERCENTAGE_PATTERN, data, re.ASCII)):
            limit: int | str = data
            return limit
        raise serializers.ValidationError(
            f"must be a number from 1 to {MAX_NODES}, or a percentage such as 25%"
        )

    def to_representation(self, value: int | str) -> int | str:
        """Return the number or percentage unchanged."""
        return value


def _whole_field(default: int, least: int, most: int, help_text: str) -> Whole:
    return Whole(required=False, min_value=least, max_value=most, default=default, help_text=help_text)


class WaveOptionsSerializer(NullIsAbsent):
    """The options of an operation that runs on a few nodes at a time, in waves."""

    max_unavailable = NodesAtOnce(
        required=False, default=1, help_text="Nodes at a time: a number, or a percentage."
    )
    canary = serializers.BooleanField(required=False, default=True, help_text="One node goes first, alone.")
    pause_seconds = _whole_field(0, 0, MAX_PAUSE_SECONDS, "Pause between two waves.")
    stop_at_failures = _whole_field(
        1, 1, MAX_NODES, "Failed nodes from which on a failure stops the next waves until you choose."
    )


def add_wave_options(scope: RequestScope, fields: Mapping[str, Any]) -> RequestScope:
    """Return the scope with the request's wave options, if there are any.

    A percentage is stored as a percentage: a retry on fewer nodes has smaller waves.
    """
    if (waves := fields.get("waves")) is None:
        return scope
    return replace(scope, waves=Options(**waves), last_replicas=sorted(set(fields.get("last_replicas", ()))))


def last_replicas_field() -> serializers.ListField:
    return serializers.ListField(
        child=Text(max_length=255),
        required=False,
        max_length=MAX_NODES,
        help_text="Models whose last replica may stop.",
    )


class ChoiceSerializer(NullIsAbsent):
    """The choice of an operator whether work in waves continues or stops."""

    choice = serializers.ChoiceField(choices=wave_requests.CHOICES)
    last_replicas = last_replicas_field()


class WavesView(OperationRoute):
    """`/api/operations/:jobID/waves`."""

    @describe_verb("operations_waves", "Continue or stop work in waves", body=ChoiceSerializer)
    def post(self, request: Request, job_id: str) -> Response:
        """Decides after a failed wave: `continue` opens the next wave, `stop` ends what has not begun.

        `stop` is possible at any time. `continue` with `last_replicas` also continues parts that wait for
        this confirmation.
        """
        operation, fields = find_operation(job_id), validate_body(ChoiceSerializer, request)
        wave_requests.choose(
            operation.id,
            fields["choice"],
            last_replicas=fields.get("last_replicas", ()),
            actor=principal(request).name,
            now=clock.now(),
        )
        stopped = fields["choice"] == wave_requests.STOP
        return Response({"success": True, "message": "stopped" if stopped else "continued"})
