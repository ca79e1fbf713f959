"""The events of a stream in OpenAI's form: server-sent events without names. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.errors import ClusterError
from localai_cluster.web import wire
from nodes.inference.generation import TextDelta

DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Chunks(ABC):
    """The stream of one answer."""

    @abstractmethod
    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """The events of these deltas."""

    def failed(self, error: ClusterError, /) -> bytes:
        """The same envelope as a refusal's, then the end."""
        return b"data: " + wire.error_answer(error).body + b"\n\n" + DONE
