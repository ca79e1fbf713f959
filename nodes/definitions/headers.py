"""The header of a model's file: the figures and tensors that determine the model's memory.

`nodes/placement/fit.py` estimates the memory from the header. The reader of the package `gguf` is not used:
it takes seconds for a header, because it creates an array for each value and tensor. It also trusts the
contents of the file, and needs requests and tqdm. The reader of this module allocates no memory whose size
the file determines, and rejects a header after a bounded number of steps.
"""

import io
import json
import os
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from localai_cluster.kit import untrusted


class UnreadableHeader(ValueError):
    """The file is truncated or has an impossible value; the error's text is the reason."""


Figure = int | tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor of a GGUF file: its name, ggml's type number, dimensions and bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, eq=False)
class Header:
    """The header of a model's file: its tensors, and its metadata by key without the architecture's prefix.

    Compared by identity, because it is large.
    """

    architecture: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Whole numbers, and lists with one number per layer. A longer list is replaced by its length."""
    tensors: tuple[Tensor, ...] = ()
    is_cut: bool = False
    """True if the header has only values from the beginning of the file."""


MAX_TEXTS = 2_000_000
"""Maximum number of texts in all lists; the largest vocabularies with merges have a quarter of it."""
MAX_HEADER_BYTES = 256 * 1024 * 1024
"""Bytes from the beginning of the file up to the last value; the largest vocabularies have a tenth of it."""
MAX_KEYS = 10_000
MAX_TENSORS = 10_000
MAX_KEY_LENGTH = 256
MAX_FIGURE = 2**32
MAX_LIST_LENGTH = 4096
"""Maximum number of figures in a list with one per layer; a longer list is replaced by its length."""
MAX_FIGURES = 100_000
"""Maximum number of figures in all lists of a header."""
MAX_CONFIG_BYTES = 1024 * 1024
MAGIC = b"GGUF"
_GGUF_VERSIONS = (2, 3)
_FORMAT_BY_INTEGER_TYPE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 7: "?", 10: "Q", 11: "q"}
_WIDTH_BY_INTEGER_TYPE = {
    code: struct.calcsize("<" + text) for code, text in _FORMAT_BY_INTEGER_TYPE.items()
} | {6: 4, 12: 8}
_TEXT_TYPE, _LIST_TYPE = 8, 9
_READ_BYTES = 1024 * 1024
_DEFAULT_ALIGNMENT = 32


def read_header(path: Path) -> Header | None:
    """Read the header of a GGUF file; None if it is no GGUF file. Raises OSError and UnreadableHeader."""
    with untrusted.open_file(path) as file:
        return _read_gguf(file, os.fstat(file.fileno()).st_size)


def parse_header(content: bytes, size: int) -> Header:
    """Parse the first bytes of a GGUF file of `size` bytes; raise UnreadableHeader."""
    header = _read_gguf(io.BytesIO(content), size)
    if header is None:
        raise UnreadableHeader("it is not a GGUF file")
    return header


def parse_figures(content: bytes, size: int) -> Header:
    """Parse the figures in the first bytes of a GGUF file of `size` bytes.

    The header has no tensors, because their table comes after the vocabulary. Raise UnreadableHeader.
    """
    file = io.BytesIO(content)
    if file.read(len(MAGIC)) != MAGIC:
        raise UnreadableHeader("it is not a GGUF file")
    return _GgufReader(file, size).figures()


def _read_gguf(file: BinaryIO, size: int) -> Header | None:
    return _GgufReader(file, size).header() if file.read(4) == MAGIC else None


class _EndsEarly(UnreadableHeader):
    """The content ends within a value."""


def _header_of(values: Mapping[str, Figure | str]) -> Header:
    """Return the header with these values, without tensors."""
    architecture = values.get("general.architecture")
    prefix = f"{architecture}."
    figures = {key.removeprefix(prefix): value for key, value in values.items() if not isinstance(value, str)}
    return Header(architecture if isinstance(architecture, str) else "", figures)


class _GgufReader:
    """Reads the header of a GGUF file from the current position on."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._texts, self._figures = file, MAX_TEXTS, MAX_FIGURES
        self._end = size

    def header(self) -> Header:
        tensors, pairs = self._counts()
        values: dict[str, Figure | str] = {}
        self._add_values(pairs, values)
        header = _header_of(values)
        return replace(header, tensors=self._tensors(tensors, header.figures.get("general.alignment")))

    def figures(self) -> Header:
        """Read the values that are complete in the content; return the header without tensors."""
        values: dict[str, Figure | str] = {}
        _, pairs = self._counts()
        is_cut = True
        with suppress(_EndsEarly):
            self._add_values(pairs, values)
            is_cut = not self._file.read(1)  # the last value may have been skipped
        return replace(_header_of(values), is_cut=is_cut)

    def _counts(self) -> tuple[int, int]:
        """Read the number of tensors and the number of values."""
        if self._integer(4) not in _GGUF_VERSIONS:
            raise UnreadableHeader("it has an unknown version")
        tensors, pairs = self._integer(10), self._integer(10)
        if tensors > MAX_TENSORS or pairs > MAX_KEYS:
            raise UnreadableHeader(f"it has {tensors} tensors and {pairs} keys")
        return tensors, pairs

    def _add_values(self, pairs: int, values: dict[str, Figure | str]) -> None:
        """Add the values of those keys that are used. Of a repeated key the first value counts."""
        for _ in range(pairs):
            key, value = self._name(), self._value(self._integer(4))
            if value is not None:
                values.setdefault(key, value)

    def _tensors(self, count: int, alignment: Figure | None) -> tuple[Tensor, ...]:
        """Read the tensors. A tensor ends where the next one begins, so unknown types are no problem.

        If several tensors have one offset, the first gets the bytes, so the sum never exceeds the file's
        size.
        """
        rows = []
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Equal shapes are stored once, as are names of all files, because many headers are kept."""
        for _ in range(count):
            name, dimensions = sys.intern(self._name()), self._integer(4)
            if dimensions > 4:
                raise UnreadableHeader(f"the tensor {name[:64]!r} has {dimensions} dimensions")
            shape = tuple(self._integer(10) for _ in range(dimensions))
            rows.append((name, shapes.setdefault(shape, shape), self._integer(4), self._integer(10)))
        step = alignment if isinstance(alignment, int) and alignment > 0 else _DEFAULT_ALIGNMENT
        position = self._file.tell()
        data = self._end - min(-(-position // step) * step, self._end)
        if any(offset > data for *_, offset in rows):
            raise UnreadableHeader("its tensors do not fit into the file")
        ends: dict[int, int] = {}
        end = data
        for offset in sorted({offset for *_, offset in rows}, reverse=True):
            ends[offset], end = end, offset
        return tuple(
            Tensor(name, kind, shape, ends.pop(offset, offset) - offset) for name, shape, kind, offset in rows
        )

    def _name(self) -> str:
        length = self._integer(10)
        if length > MAX_KEY_LENGTH:
            raise UnreadableHeader(f"a key or name has {length} bytes")
        return self._read(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Figure | str | None:
        """Read the next value: a whole number, a short text or whole numbers; None for other types."""
        if kind in _FORMAT_BY_INTEGER_TYPE:
            return _within(self._integer(kind))
        if kind == _LIST_TYPE:
            return self._list(self._integer(4), self._integer(10))
        if kind == _TEXT_TYPE:
            length = self._integer(10)
            if length <= MAX_KEY_LENGTH:
                return self._read(length).decode("utf-8", "replace")
            self._skip(length)
        elif kind in _WIDTH_BY_INTEGER_TYPE:
            self._skip(_WIDTH_BY_INTEGER_TYPE[kind])
        else:
            raise UnreadableHeader(f"it has a value of the unknown kind {kind}")
        return None

    def _list(self, kind: int, length: int) -> Figure | None:
        if kind in _FORMAT_BY_INTEGER_TYPE and length <= min(MAX_LIST_LENGTH, self._figures):
            self._figures -= length
            content = self._read(_WIDTH_BY_INTEGER_TYPE[kind] * length)
            figures = [
                _within(int(item))
                for item in struct.unpack(f"<{length}{_FORMAT_BY_INTEGER_TYPE[kind]}", content)
            ]
            return tuple(figure or 0 for figure in figures)
        if kind in _WIDTH_BY_INTEGER_TYPE:
            self._skip(_WIDTH_BY_INTEGER_TYPE[kind] * length)
        elif kind == _TEXT_TYPE:
            self._skip_texts(length)
        else:
            raise UnreadableHeader("it has a list of lists")
        return _within(length)

    def _skip_texts(self, count: int) -> None:
        self._texts -= count
        if self._texts < 0:
            raise UnreadableHeader(f"its lists have more than {MAX_TEXTS} texts")
        content, position = b"", 0
        for _ in range(count):
            if position + 8 > len(content):
                self._skip(max(position - len(content), 0))
                content, position = content[position:] + self._file.read(_READ_BYTES), 0
                if len(content) < 8:
                    raise _EndsEarly("it ends early")
            position += 8 + int.from_bytes(content[position : position + 8], "little")
        self._skip(position - len(content))

    def _integer(self, kind: int) -> int:
        return int.from_bytes(
            self._read(_WIDTH_BY_INTEGER_TYPE[kind]), "little", signed=_FORMAT_BY_INTEGER_TYPE[kind].islower()
        )

    def _read(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) < length:
            raise _EndsEarly("it ends early")
        return content

    def _skip(self, length: int) -> None:
        if length > self._end - self._file.tell():
            raise UnreadableHeader("a value is longer than the file")
        self._file.seek(length, os.SEEK_CUR)
        self._check_length()

    def _check_length(self) -> None:
        if self._file.tell() > MAX_HEADER_BYTES:
            raise UnreadableHeader(f"its header has more than {MAX_HEADER_BYTES} bytes")


def _within(figure: int) -> int | None:
    return figure if 0 <= figure <= MAX_FIGURE else None


_FIGURE_BY_CONFIG_KEY = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts_per_tok": "expert_used_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "full_attention_interval": "full_attention_interval",
    "vocab_size": "vocab_size",
}
"""Figure of a GGUF file that means the same as this key of a `config.json`."""
_SLIDING_ATTENTION, _LINEAR_ATTENTION = "sliding_attention", "linear_attention"


def read_config(path: Path) -> Header | None:
    """Read the `config.json` of a safetensors model; None if it is absent. Raises UnreadableHeader."""
    try:
        return parse_config_json(read_json(path))
    except FileNotFoundError:
        return None


def read_json(path: Path) -> object:
    """Parse a `config.json`; raise OSError and UnreadableHeader."""
    return parse_json(untrusted.read_file(path, MAX_CONFIG_BYTES))


def parse_json(content: bytes) -> Any:
    """Parse the content of a `config.json` of limited size and depth; raise UnreadableHeader."""
    problem = "too large" if len(content) > MAX_CONFIG_BYTES else untrusted.json_problem(content)
    if problem:
        raise UnreadableHeader(f"it is {problem}")
    try:
        # Bytes would also be read as UTF-16 or UTF-32, in which `json_problem` finds no strings.
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UnreadableHeader("it is not JSON") from error


def parse_config_json(config: object) -> Header:
    """Return the header that a `config.json` describes; raise UnreadableHeader."""
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise UnreadableHeader("it is not a mapping")
    figures: dict[str, Figure] = {
        figure: value
        for key, figure in _FIGURE_BY_CONFIG_KEY.items()
        if type(value := text.get(key)) is int and 0 <= value <= MAX_FIGURE
    }
    layers = text.get("layer_types")
    if isinstance(layers, list) and len(layers) <= MAX_LIST_LENGTH:
        figures["attention.sliding_window_pattern"] = tuple(
            int(kind == _SLIDING_ATTENTION) for kind in layers
        )
        heads = figures.get("attention.head_count_kv", 0)
        if _LINEAR_ATTENTION in layers and isinstance(heads, int):
            figures["attention.head_count_kv"] = tuple(heads * (kind != _LINEAR_ATTENTION) for kind in layers)
    elif text.get("use_sliding_window", True) is False or "gemma" not in str(text.get("model_type")):
        figures.pop("attention.sliding_window", None)
    # The part of a model with images for text has the windows of the model (`gemma3_text`).
    return Header(str(text.get("model_type"))[:MAX_KEY_LENGTH].removesuffix("_text"), figures)
