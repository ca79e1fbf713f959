"""The files of a model in the models folder: their sizes, and the header of a GGUF file.

R2.42: only local files are read. A model that is absent has an unknown size; nothing is requested over the
network. An unresponsive folder costs a caller ten seconds (C37), and one thread per model, however often
callers retry.

The header has the figures and tensors that determine the model's memory (`nodes/placement/fit.py`). The
reader of the package `gguf` is not used: it maps the whole file and builds an array for every value and
tensor, so a header costs seconds; it trusts the file's contents; and it needs requests and tqdm. The one here
allocates nothing whose size the file chooses, and refuses a header after a bounded number of steps. A header
is read once for each state of its file.
"""

import io
import json
import logging
import os
import re
import stat
import struct
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

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


class UnreadableHeader(ValueError):
    """The file is truncated or has an impossible value; the text is the reason."""


Figure = int | tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor of a GGUF file: its name, the number of ggml's type, its dimensions and its bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, eq=False)
class Header:
    """The figures of a model's file, by their keys without the architecture, and its tensors.

    Compared by identity, because it is large.
    """

    architecture: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Whole numbers, and lists of them that have one for each layer; a longer list is its length."""
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ModelFiles:
    """The sizes of a model's files in bytes; 0 if there are none."""

    weights: int = 0
    payload: int = 0
    """Bytes of all its files."""
    header: Header | None = None
    """None if the model is neither in GGUF files nor in safetensors, or if the header cannot be read."""
    projector: int = 0
    adapters: int = 0
    draft: int = 0
    draft_header: Header | None = None


def measure(folder: Path, definition: Definition) -> ModelFiles:
    """Measure the files that the definition names; raise OSError."""
    options = definition.options
    named = {name: path_inside(folder, options.get(name)) for name in ("Model", *NAMED)}
    adapters = [path_inside(folder, text) for text in options.get(ADAPTERS, ())] or [named["LoraAdapter"]]
    payload = sum(size for _, size in files_of(folder, definition))
    weights, header = _weights(named["Model"])
    draft, draft_header = _weights(named["DraftModel"])
    of_adapters = sum(size for path in adapters if path is not None for _, size in _files(path))
    projector = sum(size for _, size in _files(named["MMProj"])) if named["MMProj"] is not None else 0
    return ModelFiles(weights, payload, header, projector, of_adapters, draft, draft_header)


def named_paths(folder: Path, definition: Definition) -> set[Path]:
    """Return the paths of files and folders that the definition names, present or not."""
    options = definition.options
    texts = (*(options.get(name) for name in ("Model", *NAMED)), *options.get(ADAPTERS, ()))
    return {path for text in texts if (path := path_inside(folder, text)) is not None}


def files_of(folder: Path, definition: Definition) -> list[tuple[str, int]]:
    """Return path and size of the files that are there; raise OSError."""
    return [file for path in named_paths(folder, definition) for file in _files(path)]


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


def _weights(model: Path | None) -> tuple[int, Header | None]:
    """Return the bytes of a model's weights, and its header (R2.41).

    In a folder they are all weight files, or, among GGUF variants, the largest one with its shards.
    """
    files = list(_files(model)) if model is not None else []
    if model is None or not os.path.isdir(model):
        return sum(size for _, size in files), _header(name for name, _ in files)
    files = [(name, size) for name, size in files if name.endswith(_WEIGHTS)]
    variants: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, size in files:
        if name.endswith(".gguf"):
            shard = _SHARD.fullmatch(name)
            variants[shard["stem"] if shard else name][name] = size
    if variants:
        largest = max(variants.values(), key=lambda sizes: sum(sizes.values()))
        return sum(largest.values()), _header(sorted(largest))
    return sum(size for _, size in files), _header([str(model / "config.json")])


def _header(files: Iterable[str]) -> Header | None:
    """Return the header of the first file, with the tensors of all; None if one cannot be read."""
    headers = []
    for name in files:
        try:
            status = os.stat(name)
            header = _read_once(name, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            return None
        except UnreadableHeader as error:
            logger.warning("The header of %s is refused: %s", name, error)
            return None
        if header is None:
            return None
        headers.append(header)
        if sum(len(header.tensors) for header in headers) > MOST_TENSORS:
            logger.warning("The headers of %s and its other parts are refused: too many tensors", name)
            return None
    if len(headers) < 2:
        return headers[0] if headers else None
    return replace(headers[0], tensors=tuple(tensor for header in headers for tensor in header.tensors))


@lru_cache(maxsize=64)
def _read_once(name: str, size: int, changed_ns: int) -> Header | None:
    """Read the header of a file that has this size and was changed at this time."""
    path = Path(name)
    return read_config(path) if path.suffix == ".json" else read_header(path)


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


MOST_TEXTS = 2_000_000
"""Limit on the texts of all lists of a header; the largest vocabularies have a quarter of it, with merges."""
MOST_KEYS = 10_000
MOST_TENSORS = 10_000
LONGEST_KEY = 256
LARGEST_FIGURE = 2**32
LONGEST_LIST = 4096
"""Limit on the figures of a list, one for each layer; a longer list counts as its length."""
MOST_FIGURES = 100_000
"""Limit on the figures of all such lists of a header."""
MOST_CONFIG_BYTES = 1024 * 1024
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
_INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 7: "?", 10: "Q", 11: "q"}
_WIDTHS = {code: struct.calcsize("<" + text) for code, text in _INTEGERS.items()} | {6: 4, 12: 8}
_TEXT, _LIST = 8, 9
_PIECE = 1024 * 1024
_ALIGNMENT = 32


def read_header(path: Path) -> Header | None:
    """Read the header of a GGUF file; None if it is none. Raises OSError and UnreadableHeader."""
    with untrusted.open_file(path) as file:
        return _read_gguf(file, os.fstat(file.fileno()).st_size)


def parse_header(content: bytes, size: int) -> Header:
    """Parse the first bytes of a GGUF file of `size` bytes; raise UnreadableHeader."""
    header = _read_gguf(io.BytesIO(content), size)
    if header is None:
        raise UnreadableHeader("it is not a GGUF file")
    return header


def _read_gguf(file: BinaryIO, size: int) -> Header | None:
    return _GgufReader(file, size).header() if file.read(4) == _MAGIC else None


class _GgufReader:
    """A read position in the header of a GGUF file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._texts, self._figures = file, MOST_TEXTS, MOST_FIGURES
        self._end = size

    def header(self) -> Header:
        if self._integer(4) not in _VERSIONS:
            raise UnreadableHeader("it has an unknown version")
        tensors, pairs = self._integer(10), self._integer(10)
        if tensors > MOST_TENSORS or pairs > MOST_KEYS:
            raise UnreadableHeader(f"it has {tensors} tensors and {pairs} keys")
        values: dict[str, Figure | str] = {}
        for _ in range(pairs):
            key, value = self._name(), self._value(self._integer(4))
            if value is not None:
                values.setdefault(key, value)
        architecture = values.get("general.architecture")
        prefix = f"{architecture}."
        figures = {
            key.removeprefix(prefix): value for key, value in values.items() if not isinstance(value, str)
        }
        return Header(
            architecture if isinstance(architecture, str) else "",
            figures,
            self._tensors(tensors, figures.get("general.alignment")),
        )

    def _tensors(self, count: int, alignment: Figure | None) -> tuple[Tensor, ...]:
        """Read the tensors. One ends where the next begins, so types that are not known are no problem.

        Of several at one place the first has its bytes, so all together are never more than the file.
        """
        rows = []
        for _ in range(count):
            name, dimensions = self._name(), self._integer(4)
            if dimensions > 4:
                raise UnreadableHeader(f"the tensor {name[:64]!r} has {dimensions} dimensions")
            shape = tuple(self._integer(10) for _ in range(dimensions))
            rows.append((name, shape, self._integer(4), self._integer(10)))
        step = alignment if isinstance(alignment, int) and alignment > 0 else _ALIGNMENT
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
        if length > LONGEST_KEY:
            raise UnreadableHeader(f"a key or name has {length} bytes")
        return self._read(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Figure | str | None:
        """Read the next value: a whole number, a short text or a list of whole numbers; None for others."""
        if kind in _INTEGERS:
            return _within(self._integer(kind))
        if kind == _LIST:
            return self._list(self._integer(4), self._integer(10))
        if kind == _TEXT:
            length = self._integer(10)
            if length <= LONGEST_KEY:
                return self._read(length).decode("utf-8", "replace")
            self._skip(length)
        elif kind in _WIDTHS:
            self._skip(_WIDTHS[kind])
        else:
            raise UnreadableHeader(f"it has a value of the unknown kind {kind}")
        return None

    def _list(self, kind: int, length: int) -> Figure | None:
        if kind in _INTEGERS and length <= min(LONGEST_LIST, self._figures):
            self._figures -= length
            content = self._read(_WIDTHS[kind] * length)
            figures = [_within(int(item)) for item in struct.unpack(f"<{length}{_INTEGERS[kind]}", content)]
            return tuple(figure or 0 for figure in figures)
        if kind in _WIDTHS:
            self._skip(_WIDTHS[kind] * length)
        elif kind == _TEXT:
            self._skip_texts(length)
        else:
            raise UnreadableHeader("it has a list of lists")
        return _within(length)

    def _skip_texts(self, count: int) -> None:
        self._texts -= count
        if self._texts < 0:
            raise UnreadableHeader(f"its lists have more than {MOST_TEXTS} texts")
        content, position = b"", 0
        for _ in range(count):
            if position + 8 > len(content):
                self._skip(max(position - len(content), 0))
                content, position = content[position:] + self._file.read(_PIECE), 0
                if len(content) < 8:
                    raise UnreadableHeader("it ends early")
            position += 8 + int.from_bytes(content[position : position + 8], "little")
        self._skip(position - len(content))

    def _integer(self, kind: int) -> int:
        return int.from_bytes(self._read(_WIDTHS[kind]), "little", signed=_INTEGERS[kind].islower())

    def _read(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) < length:
            raise UnreadableHeader("it ends early")
        return content

    def _skip(self, length: int) -> None:
        if length > self._end - self._file.tell():
            raise UnreadableHeader("a value is longer than the file")
        self._file.seek(length, os.SEEK_CUR)


def _within(figure: int) -> int | None:
    return figure if 0 <= figure <= LARGEST_FIGURE else None


_CONFIG_KEYS = {
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
"""Keys of a `config.json` and the figures of a GGUF file that say the same."""
_SLIDING, _LINEAR = "sliding_attention", "linear_attention"


def read_config(path: Path) -> Header | None:
    """Read the `config.json` of a model in safetensors; None without one. Raises UnreadableHeader."""
    try:
        content = untrusted.read_file(path, MOST_CONFIG_BYTES)
    except FileNotFoundError:
        return None
    problem = "too large" if len(content) > MOST_CONFIG_BYTES else untrusted.json_problem(content)
    if problem:
        raise UnreadableHeader(f"it is {problem}")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise UnreadableHeader("it is not JSON") from error
    return parse_config(config)


def parse_config(config: object) -> Header:
    """Return the header that the content of a `config.json` describes; raise UnreadableHeader."""
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise UnreadableHeader("it is not a mapping")
    figures: dict[str, Figure] = {
        figure: value
        for key, figure in _CONFIG_KEYS.items()
        if type(value := text.get(key)) is int and 0 <= value <= LARGEST_FIGURE
    }
    layers = text.get("layer_types")
    if isinstance(layers, list) and len(layers) <= LONGEST_LIST:
        figures["attention.sliding_window_pattern"] = tuple(int(kind == _SLIDING) for kind in layers)
        heads = figures.get("attention.head_count_kv", 0)
        if _LINEAR in layers and isinstance(heads, int):
            figures["attention.head_count_kv"] = tuple(heads * (kind != _LINEAR) for kind in layers)
    elif text.get("use_sliding_window", True) is False or "gemma" not in str(text.get("model_type")):
        figures.pop("attention.sliding_window", None)
    return Header(str(text.get("model_type"))[:LONGEST_KEY], figures)
