"""The header of a GGUF file: the four figures that determine the model's memory.

This module does not use the package `gguf`: its reader maps the whole file and builds an array for every
value and tensor, so a header costs seconds; it trusts the file's contents; and it needs numpy, requests and
tqdm. This reader stops at the fourth figure, allocates nothing whose size the file chooses, and gives up
after a bounded number of steps. The figures that it has read by then count.
"""

import contextlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

from localai_cluster.kit import untrusted

WANTED = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
MOST_STEPS = 1_000_000
"""Limit on the keys and texts that are read; the largest vocabularies have a quarter of it."""
LONGEST_KEY = 1024
LARGEST_FIGURE = 2**24
_LONGEST_LIST = 4096
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_WIDTHS = {code: struct.calcsize(text) for code, text in _INTEGERS.items()} | {6: 4, 7: 1, 12: 8}
_TEXT, _LIST = 8, 9


class NotReadable(ValueError):
    """The file is truncated or has an impossible value."""


def header(path: Path) -> dict[str, int] | None:
    """Return the figures of `WANTED` by key, without the architecture's prefix; None if it is no GGUF file.

    Raises OSError.
    """
    with untrusted.open_file(path) as file:
        if file.read(4) != _MAGIC:
            return None
        figures: dict[str, int] = {}
        with contextlib.suppress(NotReadable):
            _Header(file).collect(figures)
        return figures


class _Header:
    """A read position in the key-value pairs of a header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._steps = file, 0
        self._end = os.fstat(file.fileno()).st_size

    def collect(self, figures: dict[str, int]) -> None:
        """Add to `figures` until none is missing; raise NotReadable if parsing cannot continue."""
        if self._integer(4) not in _VERSIONS:
            raise NotReadable("another version")
        _tensors, pairs = self._integer(10), self._integer(10)
        for _ in range(pairs):
            if len(figures) == len(WANTED):
                return
            key, kind = self._key(), self._integer(4)
            figure = self._value(kind)
            if key in WANTED and key not in figures and figure is not None and 0 < figure <= LARGEST_FIGURE:
                figures[key] = figure

    def _key(self) -> str:
        """Read the next key, without the architecture's prefix."""
        length = self._integer(10)
        if length > LONGEST_KEY:
            raise NotReadable("a key that is too long")
        return self._read(length).decode("utf-8", "replace").partition(".")[2]

    def _value(self, kind: int) -> int | None:
        """Read the next value. Return an integer, the maximum of a list of integers, or None."""
        if kind in _INTEGERS:
            return self._integer(kind)
        if kind == _LIST:
            return self._list(self._integer(4), self._integer(10))
        if kind == _TEXT:
            self._skip(self._integer(10))
        elif kind in _WIDTHS:
            self._skip(_WIDTHS[kind])
        else:
            raise NotReadable("a value of an unknown kind")
        return None

    def _list(self, kind: int, length: int) -> int | None:
        if kind in _INTEGERS and 0 < length <= _LONGEST_LIST:
            return max(self._integer(kind) for _ in range(length))
        if kind in _WIDTHS:
            self._skip(_WIDTHS[kind] * length)
        elif kind == _TEXT:
            for _ in range(length):
                self._skip(self._integer(10))
        else:
            raise NotReadable("a list of lists")
        return None

    def _integer(self, kind: int) -> int:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise NotReadable("too many values")
        (value,) = struct.unpack(_INTEGERS[kind], self._read(_WIDTHS[kind]))
        return int(value)

    def _read(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) < length:
            raise NotReadable("the end of the file")
        return content

    def _skip(self, length: int) -> None:
        if length > self._end - self._file.tell():
            raise NotReadable("a value beyond the end of the file")
        self._file.seek(length, os.SEEK_CUR)
