"""The messages of the `backend` package under names that are independent of the code generator.

All code outside `localai_cluster.rpc` builds and reads engine messages through this module.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from google.protobuf import json_format

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.generated.backend_pb2 import (
    EMBEDDING_LAYOUT_FINAL,
    EMBEDDING_LAYOUT_PER_TOKEN,
    EMBEDDING_LAYOUT_UNSPECIFIED,
    ChatDelta,
    DetokenizeRequest,
    DetokenizeResponse,
    DocumentResult,
    EmbeddingResult,
    GenerateImageRequest,
    GrammarTrigger,
    HealthMessage,
    MemoryUsageData,
    Message,
    ModelOptions,
    PredictOptions,
    ProxyOptions,
    Reply,
    RerankRequest,
    RerankResult,
    Result,
    StatusResponse,
    TokenizationResponse,
    ToolCallDelta,
    TranscriptRequest,
    TranscriptResult,
    TranscriptSegment,
    TranscriptStreamResponse,
    TranscriptWord,
    TTSRequest,
    Usage,
)


class Sign(StrEnum):
    """The result of a probe (R4.38).

    An engine may serve one request at a time, so an engine that does not answer in time counts as busy.
    """

    ALIVE = "alive"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


__all__ = [
    "EMBEDDING_LAYOUT_FINAL",
    "EMBEDDING_LAYOUT_PER_TOKEN",
    "EMBEDDING_LAYOUT_UNSPECIFIED",
    "ChatDelta",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "DocumentResult",
    "EmbeddingResult",
    "GenerateImageRequest",
    "GrammarTrigger",
    "HealthMessage",
    "MemoryUsageData",
    "Message",
    "ModelOptions",
    "PredictOptions",
    "ProxyOptions",
    "Reply",
    "RerankRequest",
    "RerankResult",
    "Result",
    "StatusResponse",
    "TTSRequest",
    "TokenizationResponse",
    "ToolCallDelta",
    "TranscriptRequest",
    "TranscriptResult",
    "TranscriptSegment",
    "TranscriptStreamResponse",
    "TranscriptWord",
    "Usage",
    "options_from_mapping",
]


def options_from_mapping(mapping: Mapping[str, Any]) -> ModelOptions:
    """Return load options from a mapping with the field names of `ModelOptions`.

    An example is `{"Model": …, "Embeddings": True}`. Raise InvalidInput for an unknown name or a value of the
    wrong type.
    """
    try:
        return json_format.ParseDict(dict(mapping), ModelOptions())
    except json_format.ParseError as error:
        raise InvalidInput(f"Not a valid load option: {error}", field="options") from error
