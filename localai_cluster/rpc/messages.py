"""The messages of the protobuf package `backend`, independent of the code generator.

All code outside `localai_cluster.rpc` builds and reads engine messages through this module.
"""

from enum import StrEnum

from localai_cluster.rpc.generated.backend_pb2 import (
    EMBEDDING_LAYOUT_FINAL,
    EMBEDDING_LAYOUT_PER_TOKEN,
    ChatDelta,
    DetokenizeRequest,
    DetokenizeResponse,
    DocumentResult,
    EmbeddingResult,
    GenerateImageRequest,
    HealthMessage,
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
    """Result of a probe of an engine (R4.38).

    An engine may serve one request at a time, so an engine that does not answer in time counts as busy.
    """

    ALIVE = "alive"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


__all__ = [
    "EMBEDDING_LAYOUT_FINAL",
    "EMBEDDING_LAYOUT_PER_TOKEN",
    "ChatDelta",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "DocumentResult",
    "EmbeddingResult",
    "GenerateImageRequest",
    "HealthMessage",
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
]
