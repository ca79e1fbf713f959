"""One response as a sequence of blocks: thoughts, text, tool calls. Pure.

Anthropic's dialect and OpenAI's Responses have this structure: a block opens, receives its pieces and closes
before the next block opens. An engine may send pieces of other blocks between the pieces of a call: such
pieces are held back until the end of the response.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from nodes.gateway.generation import NO_ARGUMENTS, TextDelta, ToolPiece


class BlockKind(Enum):
    """Kind of a block: a thought, text, or a tool call."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block of a response with the pieces received until now; `number` is its index in the response."""

    number: int
    kind: BlockKind
    call: ToolPiece
    """The first piece of the tool call. In a block of another kind its index is -1."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The text of the block, or the arguments of its call, received until now."""
        return "".join(self.parts)


class BlockChange(Enum):
    """Kind of a change of a block."""

    OPENED = "opened"
    ADDED = "added"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class BlockStep:
    """One change of one block; `text` is the text that the change adds."""

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
        """Key of the block to which the piece belongs; the pieces of a block have equal keys."""
        return (self.kind, self.call.index)


_NO_CALL = ToolPiece(-1)


class Blocks:
    """Assembles the deltas of one response into blocks. At most one block is open at a time."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: tuple[BlockKind, int] | None = None
        self._held: dict[tuple[BlockKind, int], list[_Piece]] = {}

    def steps(self, delta: TextDelta) -> Iterator[BlockStep]:
        """Yield the changes of blocks that the delta causes, in order. A final delta closes every block."""
        for piece in _split_delta(delta):
            if self._open and self._open[0] is BlockKind.CALL and piece.key != self._open:
                self._held.setdefault(piece.key, []).append(piece)
            else:
                yield from self._add_piece(piece)
        if not delta.finish:
            return
        for pieces in self._held.values():
            for piece in pieces:
                yield from self._add_piece(piece)
        yield from self._close_block(is_truncated=delta.finish == "length")

    def _add_piece(self, piece: _Piece) -> Iterator[BlockStep]:
        if piece.key != self._open:
            yield from self._close_block()
            self.blocks.append(Block(len(self.blocks), piece.kind, piece.call))
            self._open = piece.key
            yield BlockStep(BlockChange.OPENED, self.blocks[-1])
        block = self.blocks[-1]
        block.parts.append(piece.text)
        block.logprobs.extend(piece.logprobs)
        if piece.text or piece.logprobs:
            yield BlockStep(BlockChange.ADDED, block, piece.text, piece.logprobs)

    def _close_block(self, *, is_truncated: bool = False) -> Iterator[BlockStep]:
        if self._open:
            self._open = None
            block = self.blocks[-1]
            if block.kind is BlockKind.CALL and not (block.content or is_truncated):
                block.parts.append(NO_ARGUMENTS)
                yield BlockStep(BlockChange.ADDED, block, NO_ARGUMENTS)
            yield BlockStep(BlockChange.CLOSED, block)


def _split_delta(delta: TextDelta) -> Iterator[_Piece]:
    if delta.reasoning:
        yield _Piece(BlockKind.THOUGHT, delta.reasoning, _NO_CALL)
    if delta.text or delta.logprobs:
        yield _Piece(BlockKind.TEXT, delta.text, _NO_CALL, delta.logprobs)
    for call in delta.tools:
        yield _Piece(BlockKind.CALL, call.arguments, call)


def collect_blocks(deltas: Iterable[TextDelta]) -> list[Block]:
    """Return the blocks of a complete response."""
    blocks = Blocks()
    for delta in deltas:
        for _ in blocks.steps(delta):
            pass
    return blocks.blocks


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object.

    If the JSON is truncated, the result has the members that are complete.
    """
    for candidate in (text, _close_truncated_json(text)):
        try:
            value = orjson.loads(candidate)
        except orjson.JSONDecodeError:
            continue
        return value if isinstance(value, dict) else {}
    return {}


_INCOMPLETE_END = re.compile(r'(?:,\s*)?(?:"(?:[^"\\]|\\.)*"\s*(?::\s*[-+.\w]*)?|[-+.\w]+)?\s*$')
"""Pattern of the incomplete end of truncated JSON: a comma, a key without a value, or part of a value."""
_MAX_END_LENGTH = 2000
"""Number of characters at the end of truncated JSON in which `_INCOMPLETE_END` is searched."""


def _close_truncated_json(text: str) -> str:
    """Return truncated JSON without its incomplete last member and with closed brackets."""
    closing: list[str] = []
    is_text = is_escaped = False
    for character in text:
        if is_text:
            is_text = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_text = True
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
        elif character in "}]" and closing:
            closing.pop()
    if is_text:
        text = re.sub(r"\\(?:u[0-9a-fA-F]{0,3})?$", "", text) + '"'
    shortened = text[:-_MAX_END_LENGTH] + _INCOMPLETE_END.sub("", text[-_MAX_END_LENGTH:], count=1)
    for attempt in (text, shortened):
        whole = attempt + "".join(reversed(closing))
        try:
            orjson.loads(whole)
        except orjson.JSONDecodeError:
            continue
        return whole
    return ""
