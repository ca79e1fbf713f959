"""The files of a model in the models folder: their sizes, and the header of a GGUF file.

R2.42: only local files are read. A model that is absent has an unknown size; nothing is requested over the
network. An unresponsive folder costs a caller ten seconds (C37), and one thread per model, however often
callers retry.

The header has the figures that determine the model's memory. The reader of the package `gguf` is not used: it
maps the whole file and builds an array for every value and tensor, so a header costs seconds; it trusts the
file's contents; and it needs numpy, requests and tqdm. The one here stops at the fourth figure, allocates
nothing whose size the file chooses, and gives up after a bounded number of steps. The figures that it has
read by then count.
"""

import contextlib
import logging
import os
import re
import stat
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from localai_cluster.kit import untrusted
from nodes.definitions.files import Definition

logger = logging.getLogger(__name__)

MEASURE_LIMIT = 10.0
"""Seconds that a measurement may take (C37)."""
MOST_FILES = 100_000
"""Limit on the files of one folder; files beyond it do not count."""
NAMED = ("MMProj", "LoraAdapter", "LoraBase", "DraftModel", "CLIPModel", "Tokenizer", "AudioPath")
"""R2.37: the options, besides the model, that name a file. Each entry of the list `ADAPTERS` does too."""
ADAPTERS = "LoraAdapters"
SIDES = (".sha256", ".sha256.target")
"""Suffixes of checksum files that are kept beside a file."""
_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)", re.ASCII)
_MOST_SHARDS = 1000


@dataclass(frozen=True)
class ModelFiles:
    """The sizes of a model's files in bytes; 0 if there are none."""

    weights: int = 0
    payload: int = 0
    """Bytes of all its files."""
    header: dict[str, int] | None = None
    """Result of `gguf.header` if the model is one GGUF file."""


def measure(folder: Path, definition: Definition) -> ModelFiles:
    """Measure the files that the definition names; raise OSError."""
    options = definition.options
    named = [options.get(option) for option in ("Model", *NAMED)] + list(options.get(ADAPTERS, ()))
    paths = {path for text in named if (path := path_inside(folder, text)) is not None}
    payload = sum(size for path in paths for _, size in _files(path))
    model = path_inside(folder, definition.model)
    if model is None:
        return ModelFiles(payload=payload)
    files = list(_files(model))
    if os.path.isdir(model):
        return ModelFiles(_weights(files), payload)
    header = read_header(model) if os.path.isfile(model) else None
    return ModelFiles(sum(size for _, size in files), payload, header)


def with_file_paths(folder: Path, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the path of the model's file in this folder, even if the file is absent.

    Only for workers that share the folder; an engine with a model of its own uses the name only.
    """
    path = path_inside(folder, model)
    return dict(options) if path is None else {**options, "ModelFile": str(path), "ModelPath": str(folder)}


def path_inside(folder: Path, text: object) -> Path | None:
    """Return the path in the folder that an option's text names; None if it leads out of the folder."""
    if not isinstance(text, str) or "\0" in text:
        return None
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return None
    return folder / path


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, size) of the file and its shards, or of every file in the folder."""
    if not os.path.isdir(path):
        for shard in shards(path):
            yield from _size(shard)
        return
    remaining = MOST_FILES
    for base, _, file_names in os.walk(path):
        names = without_side_files(file_names)
        for name in names[:remaining]:
            yield from _size(Path(base, name))
        remaining -= len(names)
        if remaining <= 0:
            return


def shards(path: Path) -> list[Path]:
    """Return the paths of all shards of a sharded model; any other file alone."""
    if (shard := _SHARD.fullmatch(path.name)) is None:
        return [path]
    stem, count, suffix = shard["stem"], shard["count"], shard["suffix"]
    numbers = range(1, min(int(count), _MOST_SHARDS) + 1)
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in numbers]


def without_side_files(names: Sequence[str]) -> list[str]:
    """Return the names of a folder, sorted, without the checksum files kept beside a file (T-STG-11).

    A checksum file without a matching file counts as an ordinary file.
    """
    all_names = frozenset(names)
    sides = {name + suffix for name in all_names for suffix in SIDES}
    return sorted(all_names - sides)


def _size(path: Path) -> Iterator[tuple[str, int]]:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(status.st_mode):
        yield str(path), status.st_size


def _weights(files: list[tuple[str, int]]) -> int:
    """Return the bytes of a folder's weights (R2.41).

    They are all weight files, or, among GGUF variants, the largest one with its shards.
    """
    weights = [(name, size) for name, size in files if name.endswith(_WEIGHTS)]
    variants: defaultdict[str, int] = defaultdict(int)
    for name, size in weights:
        if name.endswith(".gguf"):
            shard = _SHARD.fullmatch(name)
            variants[shard["stem"] if shard else name] += size
    return max(variants.values()) if variants else sum(size for _, size in weights)


class Sizes:
    """The file sizes of one models folder. Thread-safe, and usable from several event loops."""

    def __init__(self, folder: Path, *, limit: float = MEASURE_LIMIT) -> None:
        self._folder, self._limit = folder, limit
        self._lock = threading.Lock()
        self._running: dict[str, Future[ModelFiles]] = {}

    async def of(self, definition: Definition) -> ModelFiles:
        """Measure a model's files within the time limit; all sizes are 0 for an unreadable folder (R2.40)."""
        with self._lock:
            measurement = self._running.get(definition.name)
            if measurement is None:
                measurement = untrusted.in_daemon_thread(self._measure_files, definition)
                self._running[definition.name] = measurement
        if await untrusted.wait_until_done(measurement, timeout=self._limit):
            return measurement.result()
        logger.warning("The files of %s could not be measured within %g s", definition.name, self._limit)
        return ModelFiles()

    def _measure_files(self, definition: Definition) -> ModelFiles:
        try:
            return measure(self._folder, definition)
        except Exception:
            logger.exception("The files of %s cannot be measured", definition.name)
            return ModelFiles()
        finally:
            with self._lock:
                del self._running[definition.name]


WANTED = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
MOST_STEPS = 1_000_000
"""Limit on the keys and texts that are read; the largest vocabularies have a quarter of it."""
LONGEST_KEY = 1024
LARGEST_FIGURE = 2**24
_LONGEST_LIST = 4096
_TEMPLATE_KEY = b"tokenizer.chat_template" + struct.pack("<I", 8)
"""The key of the chat template and the type of its value, a text with a length of eight bytes before it."""
_TEMPLATE_WITHIN = 64 * 1024 * 1024
"""Bytes of a GGUF file in which the template is looked for: it follows the vocabulary."""
_LONGEST_TEMPLATE = 1024 * 1024


def template_has_tools(path: Path) -> bool:
    """Return True if this is a GGUF file whose chat template has a place for tools; blocks for a moment."""
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
            content = file.read(_TEMPLATE_WITHIN)
    except OSError:
        return False
    start = content.find(_TEMPLATE_KEY) + len(_TEMPLATE_KEY)
    length = content[start : start + 8]
    if start < len(_TEMPLATE_KEY) or len(length) < 8:
        return False
    (size,) = struct.unpack("<Q", length)
    return size <= _LONGEST_TEMPLATE and b"tools" in content[start + 8 : start + 8 + size]


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_WIDTHS = {code: struct.calcsize(text) for code, text in _INTEGERS.items()} | {6: 4, 7: 1, 12: 8}
_TEXT, _LIST = 8, 9


class UnreadableHeader(ValueError):
    """The file is truncated or has an impossible value."""


def read_header(path: Path) -> dict[str, int] | None:
    """Return the figures of `WANTED` by key, without the architecture's prefix; None if it is no GGUF file.

    Raises OSError.
    """
    with untrusted.open_file(path) as file:
        if file.read(4) != _MAGIC:
            return None
        figures: dict[str, int] = {}
        with contextlib.suppress(UnreadableHeader):
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
            raise UnreadableHeader("another version")
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
            raise UnreadableHeader("a key that is too long")
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
            raise UnreadableHeader("a value of an unknown kind")
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
            raise UnreadableHeader("a list of lists")
        return None

    def _integer(self, kind: int) -> int:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise UnreadableHeader("too many values")
        (value,) = struct.unpack(_INTEGERS[kind], self._read(_WIDTHS[kind]))
        return int(value)

    def _read(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) < length:
            raise UnreadableHeader("the end of the file")
        return content

    def _skip(self, length: int) -> None:
        if length > self._end - self._file.tell():
            raise UnreadableHeader("a value beyond the end of the file")
        self._file.seek(length, os.SEEK_CUR)
