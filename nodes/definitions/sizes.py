"""The files of a model in the models folder: their sizes and headers.

R2.42: only local files are read; nothing is requested over the network. An absent file has the size in the
record of its import (`recorded_files.py`); without a record its size is unknown. An unresponsive folder costs
a caller at most ten seconds (C37), and one thread per text of a model, however often callers retry.
"""

import errno
import logging
import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from localai_cluster.kit import untrusted
from nodes.definitions.files import Definition
from nodes.definitions.headers import (
    MAGIC,
    MAX_TENSORS,
    Header,
    UnreadableHeader,
    read_config,
    read_header,
)
from nodes.definitions.recorded_files import (
    RecordedFile,
    RecordedFiles,
    files_at_source,
    files_below,
    without_tensors,
)

logger = logging.getLogger(__name__)

MEASURE_LIMIT = 10.0
"""Seconds that a measurement may take (C37)."""
MAX_FILES = 100_000
"""Maximum number of files of one folder that are counted; further files are ignored."""
FILE_OPTIONS = ("MMProj", "LoraAdapter", "LoraBase", "DraftModel", "CLIPModel", "Tokenizer", "AudioPath")
"""Options, besides the model, whose value names a file (R2.37). So does each entry of the list `ADAPTERS`."""
ADAPTERS = "LoraAdapters"
SIDES = (".sha256", ".sha256.target")
"""Suffixes of the checksum files that stand beside a file."""
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt")
_SHARD_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)", re.ASCII)
_MAX_SHARDS = 1000


@dataclass(frozen=True)
class ModelFiles:
    """The sizes of a model's files in bytes, by use; 0 if there is no such file."""

    weights: int = 0
    payload: int = 0
    """Bytes of all files together."""
    header: Header | None = None
    """Header of the weights; None if they are neither GGUF nor safetensors, or if it cannot be read."""
    projector: int = 0
    adapters: int = 0
    draft: int = 0
    draft_header: Header | None = None


def measure(folder: Path, definition: Definition) -> ModelFiles:
    """Measure the files that the definition names; raise OSError."""
    options, at_source = definition.options, files_at_source(folder, definition.files)
    named = {name: safe_join(folder, options.get(name)) for name in ("Model", *FILE_OPTIONS)}
    adapters = [safe_join(folder, text) for text in options.get(ADAPTERS, ())] or [named["LoraAdapter"]]
    files: dict[Path | None, list[tuple[str, int]]] = {}
    sizes: dict[Path | None, int] = {}
    for path in named_paths(folder, definition):
        files[path] = list(_files(path, at_source))
        sizes[path] = sum(size for _, size in files[path])
    model, draft_model = named["Model"], named["DraftModel"]
    weights, header = _read_weights(model, files.get(model, ()), at_source)
    draft, draft_header = _read_weights(draft_model, files.get(draft_model, ()), at_source)
    return ModelFiles(
        weights,
        sum(sizes.values()),
        header,
        sizes.get(named["MMProj"], 0),
        sum(sizes.get(path, 0) for path in adapters),
        draft,
        draft_header,
    )


def named_paths(folder: Path, definition: Definition) -> set[Path]:
    """Return the paths of all files and folders that the definition names, even if they do not exist."""
    options = definition.options
    texts = (*(options.get(name) for name in ("Model", *FILE_OPTIONS)), *options.get(ADAPTERS, ()))
    return {path for text in texts if (path := safe_join(folder, text)) is not None}


def records_in_definition(
    folder: Path, definition: Definition, records: RecordedFiles
) -> dict[str, RecordedFile]:
    """Return, by path, the records of files that the definition names, also in `options`."""
    by_path = {f"{folder}/{path}": file for path, file in records.items()}
    entries = [entry for name in ("Options", "Overrides") for entry in definition.options.get(name, ())]
    values = {value for entry in entries if (value := entry.partition(":")[2].strip())}
    named = [file for path, file in records.items() if values & {path, PurePosixPath(path).name}]
    for path in named_paths(folder, definition):
        named += files_below(path, by_path, shards(path)).values()
    return {file.path: file for file in named}


def files_of(folder: Path, definition: Definition) -> list[tuple[str, int]]:
    """Return path and size of each file of the model, in the folder or at its source; raise OSError."""
    at_source = files_at_source(folder, definition.files)
    return [file for path in named_paths(folder, definition) for file in _files(path, at_source)]


def with_file_paths(folder: Path, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the path of the model's file in this folder, even if the file is absent.

    Only for workers that share the folder. An engine that downloads its model uses only the model's name.
    """
    path = safe_join(folder, model)
    return dict(options) if path is None else {**options, "ModelFile": str(path), "ModelPath": str(folder)}


def safe_join(folder: Path, text: object) -> Path | None:
    """Return the path in the folder that a text in an option names; None if it leads out of the folder."""
    if not isinstance(text, str) or "\0" in text:
        return None
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return None
    return folder / path


def _files(path: Path, at_source: RecordedFiles) -> Iterator[tuple[str, int]]:
    """Yield path and size of the file and its shards, or of every file in the folder."""
    if os.path.isdir(path):
        yield from _files_in_folder(path)
    else:
        for shard in shards(path):
            yield from _stat_file(shard)
    for name, file in files_below(path, at_source, shards(path)).items():
        yield name, file.size


def _files_in_folder(path: Path) -> Iterator[tuple[str, int]]:
    remaining = MAX_FILES
    for base, _, file_names in os.walk(path):
        names = without_side_files(file_names)
        for name in names[:remaining]:
            yield from _stat_file(Path(base, name))
        remaining -= len(names)
        if remaining <= 0:
            return


def shards(path: Path) -> list[Path]:
    """Return the paths of all shards of a sharded model, [path] for any other file; `path` is one."""
    shard = _SHARD_PATTERN.fullmatch(path.name)
    if shard is None or not 1 <= int(shard["number"]) <= int(shard["count"]) <= _MAX_SHARDS:
        return [path]
    stem, count, suffix = shard["stem"], shard["count"], shard["suffix"]
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]


def shards_and_sidecar(path: Path) -> list[Path]:
    """Return the file with its shards and its sidecar file: `model.onnx` needs `model.onnx.json`."""
    sidecars = [path.with_name(path.name + ".json")] if path.suffix == ".onnx" else []
    return [*shards(path), *sidecars]


def without_side_files(names: Sequence[str]) -> list[str]:
    """Return the sorted names of a folder's files, without checksum files of other files (T-STG-11).

    A checksum file without its file counts as an ordinary file.
    """
    all_names = frozenset(names)
    sides = {name + suffix for name in all_names for suffix in SIDES}
    return sorted(all_names - sides)


_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors for a path that names no file: it may be another value of the definition."""


def _stat_file(path: Path) -> Iterator[tuple[str, int]]:
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in _NO_FILE:
            return
        raise
    if stat.S_ISREG(status.st_mode):
        yield str(path), status.st_size


def _read_weights(
    model: Path | None, files: Sequence[tuple[str, int]], at_source: RecordedFiles
) -> tuple[int, Header | None]:
    """Return the bytes of a model's weights among its `files`, and its header (R2.41).

    The weights in a folder are all weight files; if the folder has GGUF variants, the largest variant with
    its shards.
    """
    if model is None or not (os.path.isdir(model) or any(name.startswith(f"{model}/") for name in at_source)):
        return sum(size for _, size in files), _read_headers(sorted(name for name, _ in files), at_source)
    files = [(name, size) for name, size in files if name.endswith(_WEIGHT_SUFFIXES)]
    variants: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, size in files:
        if name.endswith(".gguf"):
            shard = _SHARD_PATTERN.fullmatch(name)
            variants[shard["stem"] if shard else name][name] = size
    if variants:
        largest = max(variants.values(), key=lambda sizes: sum(sizes.values()))
        return sum(largest.values()), _read_headers(sorted(largest), at_source)
    return sum(size for _, size in files), _read_headers([str(model / "config.json")], at_source)


def _read_headers(files: Sequence[str], at_source: RecordedFiles) -> Header | None:
    """Return the header of the first file, with the tensors of all files; None if a header cannot be read.

    The header has no tensors if one of the files is at its source.
    """
    if not at_source.keys().isdisjoint(files):
        first = files[0]
        header = at_source[first].header if first in at_source else _read_headers([first], {})
        return without_tensors(header)
    headers = []
    for name in files:
        try:
            status = os.stat(name)
            header = _read_once(name, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            return None
        if header is None:
            return None
        headers.append(header)
        if sum(len(header.tensors) for header in headers) > MAX_TENSORS:
            logger.warning("The headers of %s and its other parts are refused: too many tensors", name)
            return None
    if len(headers) < 2:
        return headers[0] if headers else None
    return replace(headers[0], tensors=tuple(tensor for header in headers for tensor in header.tensors))


@lru_cache(maxsize=4096)
def _read_once(name: str, size: int, changed_ns: int) -> Header | None:
    """Read the header of a file; None if it has none or is refused.

    Each file is read once for each size and time of change, which are part of the cache key.
    """
    path = Path(name)
    try:
        return read_config(path) if path.suffix == ".json" else read_header(path)
    except UnreadableHeader as error:
        logger.warning("The header of %s is refused: %s", name, error)
        return None


class Sizes:
    """The sizes of the models' files in one folder. Thread-safe, and usable from several event loops."""

    def __init__(self, folder: Path, *, limit: float = MEASURE_LIMIT) -> None:
        self._folder, self._calls = folder, untrusted.SharedCalls(limit)

    async def of(self, definition: Definition) -> ModelFiles:
        """Measure a model's files within the time limit; all sizes are 0 if the folder fails (R2.40)."""
        try:
            key = (definition.name, definition.revision)
            return await self._calls.call(key, self._measure, definition)
        except TimeoutError:
            logger.warning(
                "The files of %s could not be measured within %g s; its need counts as unknown",
                definition.name,
                self._calls.limit,
            )
            return ModelFiles()

    def _measure(self, definition: Definition) -> ModelFiles:
        try:
            return measure(self._folder, definition)
        except Exception:
            logger.exception(
                "The files of %s cannot be measured; its need counts as unknown", definition.name
            )
            return ModelFiles()


_TEMPLATE_KEY = b"tokenizer.chat_template" + struct.pack("<I", 8)
"""Bytes before a chat template in a GGUF file: its key, and the type of a text, whose length follows in eight
bytes."""
_MAX_TEMPLATE_OFFSET = 64 * 1024 * 1024
"""Bytes at the start of a GGUF file in which the template is searched; it follows the vocabulary."""
_MAX_TEMPLATE_LENGTH = 1024 * 1024


def template_has_tools(folder: Path, definition: Definition) -> bool:
    """Return True if the model's GGUF file is known to have a chat template that supports tools. Blocks."""
    path = safe_join(folder, definition.model)
    if path is None:
        return False
    try:
        if (record := files_at_source(folder, definition.files).get(str(path))) is not None:
            return record.has_tools
        status = os.stat(path)
        return _file_has_tools(path, status.st_size, status.st_mtime_ns)
    except OSError:
        return False


@lru_cache(maxsize=4096)
def _file_has_tools(path: Path, size: int, changed_ns: int) -> bool:
    """Search the template of a file, once for each size and time of change, as `_read_once`."""
    with untrusted.open_file(path) as file:
        return file.read(len(MAGIC)) == MAGIC and bool(tools_in_template(file.read(_MAX_TEMPLATE_OFFSET)))


def tools_in_template(content: bytes) -> bool | None:
    """Return True if these bytes of a GGUF file contain a chat template that supports tools.

    None if they contain no complete template.
    """
    start = content.find(_TEMPLATE_KEY) + len(_TEMPLATE_KEY)
    length = content[start : start + 8]
    if start < len(_TEMPLATE_KEY) or len(length) < 8:
        return None
    (size,) = struct.unpack("<Q", length)
    if size > _MAX_TEMPLATE_LENGTH:
        return False
    template = content[start + 8 : start + 8 + size]
    return b"tools" in template or (False if len(template) == size else None)
