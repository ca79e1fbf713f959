"""The events of a stream in OpenAI's form: server-sent events without names. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.kit.errors import ClusterError
from localai_cluster.web import wire
from nodes.gateway.generation import TextDelta

DONE = b"data: [DONE]\n\n"


def render_event(content: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Chunks(ABC):
    """The stream of one response."""

    @abstractmethod
    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the events of these deltas."""

    def failed(self, error: ClusterError, /) -> bytes:
        """Return an event with the ordinary error envelope, then the end of the stream."""
        return b"data: " + wire.error_answer(error).body + b"\n\n" + DONE
