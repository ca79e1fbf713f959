"""The events of a stream in OpenAI's form: server-sent events without names. Pure."""

from collections.abc import Mapping
from typing import Any

import orjson

from localai_cluster.errors import ClusterError
from localai_cluster.web import wire

DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def failed(error: ClusterError) -> bytes:
    """The event of a stream that cannot go on: the same envelope as a refusal's, then its end."""
    return b"data: " + wire.error_answer(error).body + b"\n\n" + DONE
