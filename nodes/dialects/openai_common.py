"""Fields that OpenAI's chat and completion bodies share, their conversion, and the events of a stream. Pure.

Unknown fields are ignored, for example fields that only concern OpenAI's own server (`store`, `service_tier`,
`user` …). A field that requires an unsupported feature is refused with its name (`refuse_fields`). A stream
consists of server-sent events without names.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import ResponseBody
from nodes.gateway import schemas
from nodes.gateway.generation import Events, Head, Sampling, TextDelta, Usage, total_usage

MAX_CHOICES = 32
"""Maximum number of choices of one request: prompts times choices per prompt."""
MAX_BODY_BYTES = 8 * 1024 * 1024
"""Maximum bytes of the body of a request that generates text."""
MAX_STOP_WORDS = 16
MAX_BIASES = 1024
_TOKEN_ID_PATTERN = re.compile("[0-9]{1,10}")

Text = Annotated[str, msgspec.Meta(min_length=1)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = int | Annotated[float, msgspec.Meta(multiple_of=1, ge=-(2**53), le=2**53)]
"""A whole number. Clients in JavaScript and R may send it as `1.0`."""
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
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """True for padding that hides the lengths of pieces. The option is ignored."""


class SamplingBody(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that chat and completion bodies share: sampling, number of choices, streaming."""

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
        """True if the last chunk of the stream has the token usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def to_sampling(
    body: SamplingBody, max_tokens: int | None, *, grammar: str, logprobs: bool, top_logprobs: int
) -> Sampling:
    """Convert the fields of a body to sampling parameters; raise InvalidInput."""
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
    """Convert a number without a fraction to an integer; None stays None."""
    return None if number is None else int(number)


def to_top_k(number: float | None) -> int | None:
    """Convert `top_k` to the engines' form, in which 0 means no limit."""
    return None if number is None else max(int(number), 0)


_UNUSED_VALUES: tuple[Any, ...] = (None, False, "", "none", [], {})
"""Values of a field that request nothing. Some clients send every field that they know."""


def refuse_fields(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise InvalidInput for the first field in `reasons` whose value requests something."""
    for name, reason in reasons.items():
        if fields.get(name) not in _UNUSED_VALUES:
            raise wire.field_error(name, reason, "unsupported_parameter")


def stop_words(stop: Stop) -> tuple[str, ...]:
    """Return the stop words of a body without empty texts."""
    return tuple(word for word in ([stop] if isinstance(stop, str) else stop or []) if word)


def render_usage(tokens: Usage) -> UsageBody:
    """Return the token usage in OpenAI's form, with cached tokens only if the engine reported them."""
    return UsageBody(
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.completion,
        total_tokens=tokens.prompt + tokens.completion,
        prompt_tokens_details=UNSET if tokens.cached is None else PromptTokens(cached_tokens=tokens.cached),
    )


def render_event(content: Mapping[str, Any]) -> bytes:
    """Return one server-sent event with this content."""
    return b"data: " + wire.encode(content) + b"\n\n"


class Chunks(Events):
    """Renders one streamed response as OpenAI's chunks."""

    done = b"data: [DONE]\n\n"

    def render_failure(self, error: ClusterError, /) -> bytes:
        """Return an event with the error envelope and the event that ends the stream."""
        return b"data: " + wire.error_answer(error).body + b"\n\n" + self.done


class CompletionEvents(Chunks):
    """Base of streamed chat and completion responses.

    If the client requested the usage, a chunk with the usage follows the last choice.
    """

    object_name: ClassVar[str]

    def __init__(self, head: Head) -> None:
        self._head = head
        self._started: set[int] = set()
        """The choices that have begun."""
        self._ended: list[TextDelta] = []
        common = {"id": head.id, "object": self.object_name, "created": head.created}
        # Encoded once, because most of a chunk is the same for every token.
        self._begin = b"data: " + wire.encode(common | {"model": head.generation.model})[:-1] + b',"choices":'

    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the encoded chunks for these deltas."""
        chunks = []
        for delta in deltas:
            chunks += self.render_delta(delta, is_first=delta.choice not in self._started)
            self._started.add(delta.choice)
        return b"".join(chunks)

    @abstractmethod
    def render_delta(self, delta: TextDelta, *, is_first: bool) -> list[bytes]:
        """Return the chunks for a delta; `is_first` is True for the first delta of its choice."""

    def _chunk(self, choices: Sequence[Any], usage: UsageBody | None = None) -> bytes:
        end = b',"usage":' + wire.encode(usage) if self._head.generation.usage_in_stream else b""
        return self._begin + wire.encode(choices) + end + b"}\n\n"

    def _end_choice(self, last: TextDelta) -> list[bytes]:
        """Return the chunk with the usage if this delta ends the last choice, otherwise nothing."""
        request = self._head.generation
        self._ended.append(last)
        if not request.usage_in_stream or len(self._ended) < request.choices:
            return []
        return [self._chunk([], render_usage(total_usage(self._ended, request.n)))]
