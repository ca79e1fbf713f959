"""What every dialect of text generation has in common: one request, one stream of deltas.

A dialect is two pure functions: `read` makes a `Generation` of a request's fields, `events` and `whole` make
bytes of deltas, piece by piece or all at once. None of them does I/O:
`engine_calls` turns a generation into calls of an engine and their replies into deltas, `generating` runs
them.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from localai_cluster.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Utterance:
    """One message of a conversation; `tool_calls` is JSON in OpenAI's form, "" without any."""

    role: str
    content: str = ""
    name: str = ""
    tool_call_id: str = ""
    reasoning: str = ""
    tool_calls: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat is about; tools in OpenAI's form, as JSON."""

    messages: tuple[Utterance, ...]
    tools: str = ""
    tool_choice: str = ""
    parallel_tool_calls: bool | None = None
    images: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()
    """Base64 of the media, in the order of the messages."""
    rendered: str | None = None
    """What the template of the model's definition makes of messages and tools; engines are told this then."""


Prompt = Conversation | str | tuple[int, ...]
"""What is answered: a conversation, a text to go on from, or the token ids of one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None: as the model's definition says."""

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
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    ignore_eos: bool = False
    grammar: str = ""
    """GBNF, or a JSON schema, which begins with `{`."""
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One request for text: each prompt is answered `n` times."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """What this dialect calls fields of OpenAI's chat that an engine may refuse."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """What the answer repeats of the request."""

    @property
    def choices(self) -> int:
        """How many answers there are; those to the first prompt come first."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """A piece of a tool call; pieces of one choice with the same index belong together."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


NO_ARGUMENTS = "{}"
"""Said for the arguments of a call of which the engine says none: clients read JSON."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the engine counted them; `cached` of the prompt's, None if it did not say."""

    prompt: int = 0
    completion: int = 0
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds: until an engine was asked, until its first piece, until its last one."""

    load: float = 0.0
    prompt: float = 0.0
    answer: float = 0.0


@dataclass(slots=True)
class TextDelta:
    """What is new of one choice. The last one of a choice says why it ended and what it took.

    Not frozen, though nothing changes it: one is made for each token, and that would take four times as long.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolPiece, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """A mapping for each token: `token`, `logprob`, `bytes`, `top_logprobs`."""
    finish: str = ""
    usage: Usage | None = None
    took: Took | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes while it waits to be sent."""
        if not (self.tools or self.logprobs):
            return 64 + len(self.text) + len(self.reasoning)
        tools = sum(len(piece.arguments) + len(piece.name) for piece in self.tools)
        tokens = sum(1 + len(token["top_logprobs"]) for token in self.logprobs)
        return 64 + len(self.text) + len(self.reasoning) + tools + 200 * tokens


Sink = Callable[[TextDelta], Awaitable[None]]
"""Takes deltas; it may take its time."""


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer says of itself beside the deltas."""

    id: str
    created: int
    generation: Generation


class Events(Protocol):
    """The stream of one answer, on its way into bytes."""

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """The events of these deltas, which follow those before."""
        ...

    def failed(self, error: ClusterError, /) -> bytes:
        """What ends a stream that cannot go on."""
        ...


EVENTS = b"text/event-stream; charset=utf-8"
"""The type of a stream of server-sent events."""
WORKING = b": working\n\n"
"""A comment between two of them."""


@dataclass(frozen=True, slots=True)
class Telling:
    """How one streamed answer is told."""

    events: Events
    done: bytes = b""
    """What ends a stream that did not fail."""
    kind: bytes = EVENTS
    """The type of a stream."""
    keep_alive: bytes = WORKING
    """What may stand between two events and says nothing."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to ask for text and to be told it."""

    read: Callable[[Mapping[str, Any]], Generation]
    events: Callable[[Head], Events]
    whole: Callable[[Head, Sequence[TextDelta]], bytes]
    done: bytes = b""
    kind: bytes = EVENTS
    keep_alive: bytes = WORKING
    """As `Telling` has them."""

    def told(self, head: Head) -> Telling:
        """How one answer is streamed."""
        return Telling(self.events(head), self.done, self.kind, self.keep_alive)


@dataclass
class FoldedChoice:
    """All deltas of one choice together."""

    text: str = ""
    reasoning: str = ""
    tools: list[ToolPiece] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    finish: str = "stop"


def folded(deltas: Iterable[TextDelta], choices: int) -> list[FoldedChoice]:
    """The choices that the deltas make."""
    made = [FoldedChoice() for _ in range(choices)]
    texts: list[list[str]] = [[] for _ in made]
    thoughts: list[list[str]] = [[] for _ in made]
    for delta in deltas:
        choice = made[delta.choice]
        texts[delta.choice].append(delta.text)
        thoughts[delta.choice].append(delta.reasoning)
        choice.tools.extend(delta.tools)
        choice.logprobs.extend(delta.logprobs)
        choice.finish = delta.finish or choice.finish
    for choice, text, thought in zip(made, texts, thoughts, strict=True):
        choice.text, choice.reasoning = "".join(text), "".join(thought)
        choice.tools = joined(choice.tools)
    return made


def joined(pieces: Iterable[ToolPiece]) -> list[ToolPiece]:
    """Whole tool calls, in the order of their indices."""
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


def total(deltas: Iterable[TextDelta], n: int) -> Usage:
    """What the whole request took: a prompt counts once, however many answers it got."""
    ended = [(delta.choice, delta.usage) for delta in deltas if delta.usage is not None]
    firsts = [usage for choice, usage in ended if choice % n == 0]
    known = [usage.cached for usage in firsts if usage.cached is not None]
    return Usage(
        sum(usage.prompt for usage in firsts),
        sum(usage.completion for _, usage in ended),
        sum(known) if known and len(known) == len(firsts) else None,
    )
