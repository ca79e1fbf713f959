"""The files of a model that lie in the models folder: how large they are, and what a GGUF says of itself.

R2.42: only files are looked at. A model that is not there has an unknown size; nothing is asked for over the
network. A folder that hangs costs a caller ten seconds (C37) and one thread a model, however often it asks.
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
"""C37: seconds."""
MOST_FILES = 100_000
"""Of one folder; what is beyond them does not count."""
NAMED = ("MMProj", "LoraAdapter", "LoraBase", "DraftModel", "CLIPModel", "Tokenizer", "AudioPath")
"""R2.37: the options that name a file besides that of the model; each of the list `ADAPTERS` does too."""
ADAPTERS = "LoraAdapters"
SIDES = (".sha256", ".sha256.target")
"""How names of checksums end that are kept beside a file."""
_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)", re.ASCII)
_MOST_SHARDS = 1000


@dataclass(frozen=True)
class ModelFiles:
    """What was found of a model, in bytes; 0 = nothing."""

    weights: int = 0
    payload: int = 0
    """All its files."""
    header: dict[str, int] | None = None
    """`gguf.header` of a model that is one file of that kind."""


def measure(folder: Path, definition: Definition) -> ModelFiles:
    """Looks at the files that the definition names; raises OSError."""
    options = definition.options
    named = [options.get(option) for option in ("Model", *NAMED)] + list(options.get(ADAPTERS, ()))
    paths = {path for text in named if (path := inside(folder, text)) is not None}
    payload = sum(size for path in paths for _, size in _files(path))
    model = inside(folder, definition.model)
    if model is None:
        return ModelFiles(payload=payload)
    found = list(_files(model))
    if os.path.isdir(model):
        return ModelFiles(_weights(found), payload)
    header = gguf.header(model) if os.path.isfile(model) else None
    return ModelFiles(sum(size for _, size in found), payload, header)


def located(folder: Path, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the place of the model's file in this folder, whether or not it is there.

    Only for workers that share the folder; an engine with a model of its own looks at the name only.
    """
    path = inside(folder, model)
    return dict(options) if path is None else {**options, "ModelFile": str(path), "ModelPath": str(folder)}


def inside(folder: Path, text: object) -> Path | None:
    """The path in the folder that an option's text means; None if it leads out of it."""
    if not isinstance(text, str) or "\0" in text:
        return None
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return None
    return folder / path


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """(name, size) of the file and its shards, or of every file below the folder; nothing if it is absent."""
    if not os.path.isdir(path):
        for one in shards(path):
            yield from _size(one)
        return
    left = MOST_FILES
    for base, _, found in os.walk(path):
        names = without_side_files(found)
        for name in names[:left]:
            yield from _size(Path(base, name))
        left -= len(names)
        if left <= 0:
            return


def shards(path: Path) -> list[Path]:
    """The parts of a model that was divided; any other file alone."""
    if (shard := _SHARD.fullmatch(path.name)) is None:
        return [path]
    stem, count, suffix = shard["stem"], shard["count"], shard["suffix"]
    numbers = range(1, min(int(count), _MOST_SHARDS) + 1)
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in numbers]


def without_side_files(names: Sequence[str]) -> list[str]:
    """The names in a folder, in order, without those of checksums kept beside a file (T-STG-11).

    Such a file with no other beside it is one like any other.
    """
    there = frozenset(names)
    sides = {name + suffix for name in there for suffix in SIDES}
    return sorted(there - sides)


def _size(path: Path) -> Iterator[tuple[str, int]]:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(status.st_mode):
        yield str(path), status.st_size


def _weights(files: list[tuple[str, int]]) -> int:
    """R2.41: of a folder all files of weights; of GGUF variants the largest one, its shards together."""
    weights = [(name, size) for name, size in files if name.endswith(_WEIGHTS)]
    variants: defaultdict[str, int] = defaultdict(int)
    for name, size in weights:
        if name.endswith(".gguf"):
            shard = _SHARD.fullmatch(name)
            variants[shard["stem"] if shard else name] += size
    return max(variants.values()) if variants else sum(size for _, size in weights)


class Sizes:
    """The files of one models folder. Safe to use from several threads and loops."""

    def __init__(self, folder: Path, *, limit: float = MEASURE_LIMIT) -> None:
        self._folder, self._limit = folder, limit
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[ModelFiles]] = {}

    async def of(self, definition: Definition) -> ModelFiles:
        """What is found within the time limit; nothing is known of a folder that cannot be read (R2.40)."""
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
        """The look that is under way, or a new one on a thread of its own."""
        with self._lock:
            if (running := self._under_way.get(definition.name)) is not None:
                return running
            made = self._under_way[definition.name] = Future[ModelFiles]()
        made.set_running_or_notify_cancel()  # a load that leaves must not cancel it
        threading.Thread(target=self._carry_out, args=(definition, made), name="sizes", daemon=True).start()
        return made

    def _carry_out(self, definition: Definition, made: "Future[ModelFiles]") -> None:
        found = ModelFiles()
        try:
            found = measure(self._folder, definition)
        except Exception:
            logger.exception("The files of %s cannot be measured", definition.name)
        finally:
            with self._lock:
                del self._under_way[definition.name]
            made.set_result(found)
