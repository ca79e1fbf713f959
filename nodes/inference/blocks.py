"""One answer as blocks, one after the other: thoughts, text, calls of tools. Pure.

Anthropic's dialect and OpenAI's newer one have it so: a block opens, is said piece by piece, closes, and only
then the next one opens. Engines send the pieces of a call together, but nothing makes them: what comes for
another block while a call is open waits for the end of the answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from nodes.inference.generation import NO_ARGUMENTS, TextDelta, ToolPiece


class BlockKind(Enum):
    """What a block is."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A block so far; `number` is its place in the answer."""

    number: int
    kind: BlockKind
    call: ToolPiece
    """Of a call, its first piece."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def content(self) -> str:
        """All that was said of it: text, or the arguments of a call."""
        return "".join(self.parts)


class BlockChange(Enum):
    """What a step does to its block."""

    OPENED = "opened"
    SAID = "said"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What happens to a block; `text` is what is said."""

    change: BlockChange
    block: Block
    text: str = ""
    logprobs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: BlockKind
    text: str
    call: ToolPiece
    logprobs: Sequence[Mapping[str, Any]] = ()

    @property
    def key(self) -> tuple[BlockKind, int]:
        """Pieces with the same key go into one block."""
        return (self.kind, self.call.index)


_NO_CALL = ToolPiece(-1)


class Blocks:
    """The blocks that deltas make."""

    def __init__(self) -> None:
        self.made: list[Block] = []
        self._open: tuple[BlockKind, int] | None = None
        self._held: dict[tuple[BlockKind, int], list[_Piece]] = {}

    def steps(self, delta: TextDelta) -> Iterator[BlockStep]:
        """What the delta adds, in order; after the last one everything is closed."""
        for piece in _pieces(delta):
            if self._open and self._open[0] is BlockKind.CALL and piece.key != self._open:
                self._held.setdefault(piece.key, []).append(piece)
            else:
                yield from self._with(piece)
        if not delta.finish:
            return
        for pieces in self._held.values():
            for piece in pieces:
                yield from self._with(piece)
        yield from self._closed(cut=delta.finish == "length")

    def _with(self, piece: _Piece) -> Iterator[BlockStep]:
        if piece.key != self._open:
            yield from self._closed()
            self.made.append(Block(len(self.made), piece.kind, piece.call))
            self._open = piece.key
            yield BlockStep(BlockChange.OPENED, self.made[-1])
        block = self.made[-1]
        block.parts.append(piece.text)
        block.logprobs.extend(piece.logprobs)
        if piece.text or piece.logprobs:
            yield BlockStep(BlockChange.SAID, block, piece.text, piece.logprobs)

    def _closed(self, *, cut: bool = False) -> Iterator[BlockStep]:
        if self._open:
            self._open = None
            block = self.made[-1]
            if block.kind is BlockKind.CALL and not (block.content or cut):
                block.parts.append(NO_ARGUMENTS)
                yield BlockStep(BlockChange.SAID, block, NO_ARGUMENTS)
            yield BlockStep(BlockChange.CLOSED, block)


def _pieces(delta: TextDelta) -> Iterator[_Piece]:
    if delta.reasoning:
        yield _Piece(BlockKind.THOUGHT, delta.reasoning, _NO_CALL)
    if delta.text or delta.logprobs:
        yield _Piece(BlockKind.TEXT, delta.text, _NO_CALL, delta.logprobs)
    for call in delta.tools:
        yield _Piece(BlockKind.CALL, call.arguments, call)


def of(deltas: Iterable[TextDelta]) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = Blocks()
    for delta in deltas:
        for _ in blocks.steps(delta):
            pass
    return blocks.made


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; an answer that was cut off may have left less than one."""
    try:
        read = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}
