"""Fields that OpenAI's chat and completion bodies share, their conversion, and the events of a stream. Pure.

Unknown fields are ignored, for example fields that only concern OpenAI's own server (`store`, `service_tier`,
`user` …). A field that requires an unsupported feature is refused with its name (`refuse_fields`). A stream
consists of server-sent events without names.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import ResponseBody
from nodes.gateway import schemas
from nodes.gateway.generation import Head, Sampling, TextDelta, Usage, total_usage

MAX_CHOICES = 32
"""Maximum number of choices of one request, for all prompts together."""
MAX_BODY_BYTES = 8 * 1024 * 1024
"""Limit on the bytes of the body of a request for text."""
MAX_STOP_WORDS = 16
MAX_BIASES = 1024
_TOKEN_ID_PATTERN = re.compile("[0-9]{1,10}")

Text = Annotated[str, msgspec.Meta(min_length=1)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = int | Annotated[float, msgspec.Meta(multiple_of=1, ge=-(2**53), le=2**53)]
"""A whole number; clients in JavaScript and R may send `1.0`."""
TopK = (
    Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
    | Annotated[float, msgspec.Meta(multiple_of=1, ge=-1, le=2**31 - 1)]
)
"""The number of likeliest tokens to choose from; -1 and 0 mean no limit."""
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
Stop = str | Annotated[list[Text], msgspec.Meta(max_length=MAX_STOP_WORDS)] | None


FinishReason = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]


class PromptTokens(ResponseBody):
    cached_tokens: int


class UsageBody(ResponseBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: (
        Annotated[
            PromptTokens,
            msgspec.Meta(description="What of the prompt the engine remembered; only if it says so."),
        ]
        | UnsetType
    ) = UNSET


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: padding that hides the lengths of pieces."""


class SamplingBody(msgspec.Struct, kw_only=True, frozen=True):
    """The fields about how tokens are chosen, and how the answer comes."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    stop: Stop = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=MAX_BIASES)] | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repeat_penalty: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    user: str | None = None

    @property
    def streams_usage(self) -> bool:
        """True if the stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def to_sampling(
    body: SamplingBody, max_tokens: int | None, *, grammar: str, logprobs: bool, top_logprobs: int
) -> Sampling:
    """Return the sampling parameters of a body; raise InvalidInput."""
    if not all(_TOKEN_ID_PATTERN.fullmatch(name) and int(name) < 2**31 for name in body.logit_bias or ()):
        raise InvalidInput("logit_bias: names are token ids", field="logit_bias")
    schemas.check_grammar(body.grammar or "")
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=to_top_k(body.top_k),
        min_p=body.min_p,
        repeat_penalty=body.repeat_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        seed=to_int(body.seed),
        stop=stop_words(body.stop),
        logit_bias=body.logit_bias or {},
        ignore_eos=bool(body.ignore_eos),
        grammar=grammar,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def to_int(number: float | None) -> int | None:
    """Return a whole number as an integer."""
    return None if number is None else int(number)


def to_top_k(number: float | None) -> int | None:
    """Return `top_k` in the form of engines, where 0 means no limit."""
    return None if number is None else max(int(number), 0)


_UNUSED_VALUES: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values that do not use a feature: some clients send every field of their form."""


def refuse_fields(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise InvalidInput for the first field in `reasons` that the request sets to a value that uses it."""
    for name, reason in reasons.items():
        if fields.get(name) not in _UNUSED_VALUES:
            raise wire.field_error(name, reason, "unsupported_parameter")


def stop_words(stop: Stop) -> tuple[str, ...]:
    """Return the stop words of a body; an empty text is ignored."""
    return tuple(word for word in ([stop] if isinstance(stop, str) else stop or []) if word)


def render_usage(tokens: Usage) -> UsageBody:
    """Return the usage in OpenAI's form, with cached tokens only if the engine reported them."""
    return UsageBody(
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.completion,
        total_tokens=tokens.prompt + tokens.completion,
        prompt_tokens_details=UNSET if tokens.cached is None else PromptTokens(cached_tokens=tokens.cached),
    )


DONE_EVENT = b"data: [DONE]\n\n"


def render_event(content: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + wire.encode(content) + b"\n\n"


class Chunks(ABC):
    """The stream of one response."""

    @abstractmethod
    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the events for the deltas."""

    def render_failure(self, error: ClusterError, /) -> bytes:
        """Return an event with the usual error envelope, and the end of the stream."""
        return b"data: " + wire.error_answer(error).body + b"\n\n" + DONE_EVENT


class CompletionEvents(Chunks):
    """The chunks of a streamed completion; if requested, a chunk with the usage follows the last choice."""

    object_name: ClassVar[str]

    def __init__(self, head: Head) -> None:
        self._head = head
        self._ended: list[TextDelta] = []
        common = {"id": head.id, "object": self.object_name, "created": head.created}
        # Encoded once, because most of a chunk is the same for every token.
        self._begin = b"data: " + wire.encode(common | {"model": head.generation.model})[:-1] + b',"choices":'

    def _chunk(self, choices: Sequence[Any], usage: UsageBody | None = None) -> bytes:
        end = b',"usage":' + wire.encode(usage) if self._head.generation.usage_in_stream else b""
        return self._begin + wire.encode(choices) + end + b"}\n\n"

    def _end_choice(self, last: TextDelta) -> list[bytes]:
        """Return the chunk with the usage if this was the last delta of the last choice."""
        request = self._head.generation
        self._ended.append(last)
        if not request.usage_in_stream or len(self._ended) < request.choices:
            return []
        return [self._chunk([], render_usage(total_usage(self._ended, request.n)))]
