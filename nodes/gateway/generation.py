"""The common model of all text generation dialects: one request, one stream of deltas.

A dialect is pure functions without I/O: `parse` converts a request's fields to a `Generation`; `events` and
`render_response` render deltas as bytes, incrementally or at once. `generate.py` converts a generation to
engine calls and their replies to deltas; a `Pipe` queues deltas for a slow client.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from localai_cluster.kit.errors import ClusterError


class ConversationMessage(msgspec.Struct, frozen=True):
    """One message of a conversation; `tool_calls` is JSON in OpenAI's form, "" without calls."""

    role: str
    content: str = ""
    name: str = ""
    tool_call_id: str = ""
    reasoning: str = ""
    tool_calls: str = ""


class Conversation(msgspec.Struct, frozen=True):
    """The messages, tools and media of a chat; tools are JSON in OpenAI's form, "" without tools."""

    messages: tuple[ConversationMessage, ...]
    tools: str = ""
    tool_choice: str = ""
    parallel_tool_calls: bool | None = None
    images: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()
    """Base64 data of the audio parts, in the order of the messages."""
    rendered: str | None = None
    """The prompt rendered by the definition's template. Engines get it instead of messages and tools."""


Prompt = Conversation | str | tuple[int, ...]
"""Input of a generation: a conversation, a text to continue, or the token ids of such a text."""


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters; None means the default of the model's definition."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[str, float] = msgspec.field(default_factory=dict)
    ignore_eos: bool = False
    grammar: str = ""
    """A grammar in GBNF, or a JSON schema, which begins with `{`."""
    logprobs: bool = False
    top_logprobs: int = 0


class Generation(msgspec.Struct, frozen=True):
    """One request for text, with `n` choices for each prompt."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    client_field_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The dialect's names for fields of OpenAI's chat. Refusals of engines use them."""
    echo: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Fields of the request that the response repeats."""
    tool_namespaces: Mapping[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    """Namespace and name in the namespace of each function from a namespace, by its name in this request."""

    @property
    def choices(self) -> int:
        """Number of choices of the request. All choices of the first prompt come first."""
        return len(self.prompts) * self.n


class ToolPiece(msgspec.Struct, frozen=True):
    """A piece of a tool call. The pieces of one call have the same choice and index."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


NO_ARGUMENTS = "{}"
"""Arguments of a call for which the engine reports none, because clients parse the arguments as JSON."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a response; `cached` is part of `prompt`, None if the engine did not report it."""

    prompt: int = 0
    completion: int = 0
    cached: int | None = None


class Durations(msgspec.Struct, frozen=True):
    """Seconds until the engine was called, from then to the first piece, and from then to the last piece."""

    load: float = 0.0
    prompt: float = 0.0
    answer: float = 0.0


class TextDelta(msgspec.Struct):
    """New content of one choice. The last delta of a choice has finish reason, usage and durations.

    Immutable by convention after its choice has ended.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolPiece, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """A mapping for each token: `token`, `logprob`, `bytes`, `top_logprobs`."""
    finish: str = ""
    stop_word: str = ""
    """The stop word of the request that ended the choice, if the engine has reported it."""
    usage: Usage | None = None
    durations: Durations | None = None
    prompt_tokens: int = 0
    """Number of the prompt's tokens, in the first delta of a response, if the engine has reported it by
    then."""

    @property
    def size(self) -> int:
        """Approximate bytes that the delta takes in a queue."""
        if not (self.tools or self.logprobs):
            return 64 + len(self.text) + len(self.reasoning)
        tools = sum(len(piece.arguments) + len(piece.name) for piece in self.tools)
        tokens = sum(1 + len(token["top_logprobs"]) for token in self.logprobs)
        return 64 + len(self.text) + len(self.reasoning) + tools + 200 * tokens


MAX_PIPE_BYTES = 256 * 1024
"""Approximate maximum bytes of queued deltas. Above it the pipe blocks the engine's reader."""


class Pipe:
    """A bounded queue of deltas between the engine's reader and the client's writer, on one event loop."""

    def __init__(self) -> None:
        self._queue: list[TextDelta] = []
        self._size = 0
        self._closed = False
        self._ready, self._has_space = asyncio.Event(), asyncio.Event()

    @property
    def ended(self) -> bool:
        """True if the pipe is closed and empty."""
        return self._closed and not self._queue

    async def put(self, delta: TextDelta) -> None:
        """Add a delta. Wait while the queue is full."""
        while self._size > MAX_PIPE_BYTES:
            self._has_space.clear()
            await self._has_space.wait()
        self._queue.append(delta)
        self._size += delta.size
        self._ready.set()

    def close(self) -> None:
        """Close the pipe. No delta may be added afterwards."""
        self._closed = True
        self._ready.set()

    def wake_reader(self) -> None:
        """Make a waiting `take` return, without adding a delta."""
        self._ready.set()

    async def take(self) -> list[TextDelta]:
        """Wait for deltas and return all of them; none if the pipe is closed or `wake_reader` was called."""
        await self._ready.wait()
        deltas, self._queue, self._size = self._queue, [], 0
        if not self._closed:
            self._ready.clear()
        self._has_space.set()
        return deltas


@dataclass(frozen=True, slots=True)
class Head:
    """Metadata of a response: its id, creation time and request.

    `call_key` are 24 random hexadecimal digits for the ids of tool calls. A client may choose `id`, and may
    send the same one with every request of a conversation.
    """

    id: str
    created: int
    generation: Generation
    call_key: str = field(default_factory=lambda: os.urandom(12).hex())


class Events(ABC):
    """Renders the stream of one response as bytes. Calls must follow the order of the deltas."""

    kind: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    """Content type of the response."""
    keep_alive: ClassVar[bytes] = b": working\n\n"
    """Bytes between two events that clients ignore."""
    done: ClassVar[bytes] = b""
    """Bytes that end a successful stream."""

    @abstractmethod
    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the encoded events for these deltas."""

    @abstractmethod
    def render_failure(self, error: ClusterError, /) -> bytes:
        """Return the encoded events that end a stream after an error."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API for text generation: it parses requests and renders responses."""

    parse: Callable[[Mapping[str, Any]], Generation]
    events: Callable[[Head], Events]
    render_response: Callable[[Head, Sequence[TextDelta]], bytes]


@dataclass
class MergedChoice:
    """The complete content of one choice, merged from its deltas."""

    text: str = ""
    reasoning: str = ""
    tools: list[ToolPiece] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    finish: str = "stop"


def merge_deltas(deltas: Iterable[TextDelta], choices: int) -> list[MergedChoice]:
    """Merge deltas into the complete content of each of `choices` choices."""
    merged = [MergedChoice() for _ in range(choices)]
    texts: list[list[str]] = [[] for _ in merged]
    thoughts: list[list[str]] = [[] for _ in merged]
    for delta in deltas:
        choice = merged[delta.choice]
        texts[delta.choice].append(delta.text)
        thoughts[delta.choice].append(delta.reasoning)
        choice.tools.extend(delta.tools)
        choice.logprobs.extend(delta.logprobs)
        choice.finish = delta.finish or choice.finish
    for choice, text, thought in zip(merged, texts, thoughts, strict=True):
        choice.text, choice.reasoning = "".join(text), "".join(thought)
        choice.tools = merge_tool_calls(choice.tools)
    return merged


def merge_tool_calls(pieces: Iterable[ToolPiece]) -> list[ToolPiece]:
    """Merge pieces into complete tool calls, ordered by index."""
    calls: dict[int, list[ToolPiece]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return [
        ToolPiece(
            index,
            next((piece.id for piece in parts if piece.id), ""),
            next((piece.name for piece in parts if piece.name), ""),
            "".join(piece.arguments for piece in parts),
        )
        for index, parts in sorted(calls.items())
    ]


def last_delta(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return the delta that ends the only choice of a response."""
    return next((delta for delta in reversed(deltas) if delta.finish), TextDelta(0, finish="stop"))


def total_usage(deltas: Iterable[TextDelta], n: int) -> Usage:
    """Return the token usage of the whole request. A prompt with several choices counts once."""
    usages = [(delta.choice, delta.usage) for delta in deltas if delta.usage is not None]
    firsts = [usage for choice, usage in usages if choice % n == 0]
    cached_counts = [usage.cached for usage in firsts if usage.cached is not None]
    return Usage(
        sum(usage.prompt for usage in firsts),
        sum(usage.completion for _, usage in usages),
        sum(cached_counts) if cached_counts and len(cached_counts) == len(firsts) else None,
    )
