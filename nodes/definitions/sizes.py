"""The files of a model in the models folder: their sizes, and the header of a GGUF file.

R2.42: only local files are read. A model that is absent has an unknown size; nothing is requested over the
network. An unresponsive folder costs a caller ten seconds (C37), and one thread per model, however often
callers retry.
"""

import asyncio
import logging
import os
import re
import stat
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nodes.definitions import gguf
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
    paths = {path for text in named if (path := inside(folder, text)) is not None}
    payload = sum(size for path in paths for _, size in _files(path))
    model = inside(folder, definition.model)
    if model is None:
        return ModelFiles(payload=payload)
    files = list(_files(model))
    if os.path.isdir(model):
        return ModelFiles(_weights(files), payload)
    header = gguf.header(model) if os.path.isfile(model) else None
    return ModelFiles(sum(size for _, size in files), payload, header)


def located(folder: Path, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the path of the model's file in this folder, even if the file is absent.

    Only for workers that share the folder; an engine with a model of its own uses the name only.
    """
    path = inside(folder, model)
    return dict(options) if path is None else {**options, "ModelFile": str(path), "ModelPath": str(folder)}


def inside(folder: Path, text: object) -> Path | None:
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
        waiting = asyncio.wrap_future(self._begin(definition))
        try:
            done, _ = await asyncio.wait([waiting], timeout=self._limit)
        finally:
            waiting.cancel()
        if done:
            return waiting.result()
        logger.warning("The files of %s could not be measured within %g s", definition.name, self._limit)
        return ModelFiles()

    def _begin(self, definition: Definition) -> "Future[ModelFiles]":
        """Return the running measurement, or start one on a thread of its own."""
        with self._lock:
            if (running := self._running.get(definition.name)) is not None:
                return running
            measurement = self._running[definition.name] = Future[ModelFiles]()
        measurement.set_running_or_notify_cancel()  # a cancelled load must not cancel the measurement
        threading.Thread(
            target=self._measure_files, args=(definition, measurement), name="sizes", daemon=True
        ).start()
        return measurement

    def _measure_files(self, definition: Definition, measurement: "Future[ModelFiles]") -> None:
        files = ModelFiles()
        try:
            files = measure(self._folder, definition)
        except Exception:
            logger.exception("The files of %s cannot be measured", definition.name)
        finally:
            with self._lock:
                del self._running[definition.name]
            measurement.set_result(files)
