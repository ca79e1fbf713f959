"""The files of a model that an engine on another machine needs, and reading them in the models folder.

The options of a definition name the files: the model's file, other files in its folder, and values in
`Options` and `Overrides` (R2.57, worker.md §14). `plan_files` reads the folder. `FilePlan.engine_options`
rewrites the options according to the result of the transfer, without I/O. Nothing outside the models folder
is sent: a path or link that leads out of the folder is not followed. A file that an import has left at its
source is planned by its record. The key of a file on a worker is `models/<model>/<path in the models folder>`
(R2.58). The worker answers with the path on its own disk; without its relative part, this path is the folder
that relative options are resolved against.

Files are read in dedicated threads, because the folder may hang: a read from a mount whose server is down
returns late or never. Such a read must not block the event loop, a thread that the database needs, or the end
of the process. The SHA-256 of a file is computed once and then found by the file's stamp, which consists of
size, both times and inode: a replaced file has another stamp. The hash of a file that was written a moment
ago is not stored, because the file could change again within one tick of its clock.
"""

import asyncio
import hashlib
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar
from urllib.parse import quote

from localai_cluster.kit import clock, names, untrusted
from nodes.definitions.recorded_files import (
    FolderReplaced,
    RecordedFile,
    RecordedFiles,
    files_at_source,
    files_below,
    lacks_marker,
)
from nodes.definitions.sizes import (
    ADAPTERS,
    FILE_OPTIONS,
    MAX_FILES,
    SIDES,
    safe_join,
    shards_and_sidecar,
    without_side_files,
)
from nodes.models import FileHash
from operations.executor.work import in_thread

_ROUTE_PREFIX = "/v1/files/"


class InvalidPath(ValueError):
    """A path that cannot have a key on a worker; the text gives the reason."""


def key_of(model: str, relative: str) -> str:
    """Return the key of the file at this path of the models folder.

    Raise InvalidPath if the path leads out of the folder, or cannot be written into a header or gRPC message.
    """
    parts = (*model.split("/"), *relative.split("/"))
    if not {"", ".", ".."}.isdisjoint(parts):
        raise InvalidPath("leads out of its folder")
    if "\\" in model or "\\" in relative:
        raise InvalidPath("has a backslash in its name")
    for text in (model, relative):
        if character := names.find_unprintable(text):
            raise InvalidPath(f"has the character {character} in its name")
    return "/".join(("models", *parts))


def path_of(key: str) -> str:
    """Return the URL path of this key, with every reserved character encoded."""
    return _ROUTE_PREFIX + quote(key)


MODEL_FILE = "ModelFile"
"""Load option: the path of the model's file on the worker."""
MODEL_PATH = "ModelPath"
"""Load option: the folder on the worker that relative options are resolved against."""
_SCALES_OPTION = "LoraScales"
_OPTION_KEPT_IF_MISSING = "LoraBase"
_NAMED_VALUE_OPTIONS = ("Options", "Overrides")
"""Options with entries `name:value` whose value may name a file; these entries are sent unchanged."""


class Unsendable(Exception):
    """An option names a file or folder that cannot be sent to a worker; the text gives the reason."""


@dataclass(frozen=True)
class LocalFile:
    """A file of the models folder that is sent."""

    relative: str
    """The file's path in the models folder, which is also its path on the worker."""
    path: Path
    """The file's resolved path, which is in the models folder too."""
    size: int
    record: RecordedFile | None = None
    """The import's record of a file that is only at its source; None for a file in the models folder."""


@dataclass(frozen=True)
class NamedFiles:
    """The files that one text in the options names: one file, or all files of a folder."""

    option: str
    text: str
    relative: str
    files: tuple[LocalFile, ...]

    @property
    def needed(self) -> frozenset[str]:
        """The paths of the files without which the option cannot be used.

        A checksum file in a folder is optional: our own worker accepts no checksum file, because it would
        vouch for another file.
        """
        paths = (file.relative for file in self.files)
        return frozenset(path for path in paths if path == self.relative or not path.lower().endswith(SIDES))


@dataclass(frozen=True)
class FilePlan:
    """The files to send for one model."""

    options: Mapping[str, Any]
    """The options of the definition."""
    named: tuple[NamedFiles, ...] = ()
    missing: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By option and text: why no file is sent for it."""

    @cached_property
    def files(self) -> dict[str, LocalFile]:
        """All files by their path in the models folder, beginning with those of the model itself."""
        return {file.relative: file for target in self.named for file in target.files}

    @property
    def at_source(self) -> list[str]:
        """The paths of the files that are only at their sources."""
        return [path for path, file in self.files.items() if file.record is not None]

    def is_vital(self, relative: str) -> bool:
        """Return True if the model cannot be loaded without this file."""
        return any(target.option == MODEL_FILE and relative in target.needed for target in self.named)

    def engine_options(self, root: str, failed: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
        """Return the options for an engine whose model files are in `root`, and a warning per dropped option.

        `failed` maps each file that was not sent to the reason; it must not contain files of the model
        itself.
        """
        lost = dict(self.missing)
        paths: dict[tuple[str, str], str] = {}
        for target in self.named:
            if reason := next((cause for relative, cause in failed.items() if relative in target.needed), ""):
                lost[target.option, target.text] = reason
            else:
                paths[target.option, target.text] = f"{root}/{target.relative}"
        options = _with_worker_paths(self.options, paths)
        if root:
            options[MODEL_PATH] = root
        return options, [f"{option} {text}: {cause}" for (option, text), cause in sorted(lost.items())]


def _with_worker_paths(options: Mapping[str, Any], paths: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return the options with the worker's paths, without the options whose file is not on the worker."""
    result = dict(options)
    for name in FILE_OPTIONS:
        path = paths.get((name, str(result.get(name, ""))))
        if path is not None:
            result[name] = path
        elif name != _OPTION_KEPT_IF_MISSING:
            result.pop(name, None)
    if ADAPTERS in result:
        candidates = [(index, paths.get((ADAPTERS, text))) for index, text in enumerate(result[ADAPTERS])]
        adapters = [(index, path) for index, path in candidates if path is not None]
        scales = result.get(_SCALES_OPTION, ())
        if len(scales) == len(result[ADAPTERS]):
            result[_SCALES_OPTION] = [scales[index] for index, _ in adapters]
        result[ADAPTERS] = [path for _, path in adapters]
    model = (MODEL_FILE, str(result.get("Model", "")))
    if model in paths:
        result[MODEL_FILE] = paths[model]
    return result


def plan_files(
    folder: Path, name: str, options: Mapping[str, Any], recorded: RecordedFiles | None = None
) -> FilePlan:
    """Return the files to send: those that the options of the model `name` mean.

    `recorded` files may be at their sources. Raises Unsendable if the model's own file exists but is outside
    of the folder or cannot be read. Raises FolderReplaced if a recorded file is absent from a folder that has
    lost its marker.
    """
    at_source = files_at_source(folder, recorded or {})
    if at_source and lacks_marker(folder, at_source.values()):
        raise FolderReplaced(folder)
    reader = _FolderReader(folder, name, at_source)
    named: list[NamedFiles] = []
    missing: dict[tuple[str, str], str] = {}
    for option, text in named_texts(options):
        try:
            target = reader.find_files(option, text)
        except (Unsendable, OSError) as error:
            problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            if option == MODEL_FILE:
                raise Unsendable(f"the model's file {text} {problem}") from error
            missing[option, text] = problem
        else:
            if target is not None:
                named.append(target)
            elif option not in _NAMED_VALUE_OPTIONS:
                missing[option, text] = "not found in the models folder"
    return FilePlan(options, tuple(named), missing)


def named_texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield pairs of an option and a text in it that may name files; the model's own file comes first."""
    yield MODEL_FILE, str(options.get("Model", ""))
    for name in FILE_OPTIONS:
        if options.get(name):
            yield name, str(options[name])
    for text in options.get(ADAPTERS, ()):
        yield ADAPTERS, text
    for name in _NAMED_VALUE_OPTIONS:
        for entry in options.get(name, ()):
            value = entry.partition(":")[2].strip()
            if value:
                yield name, value


def _raise_walk_error(error: OSError) -> None:
    """Raise the error of `os.walk`, so that an unreadable folder does not count as empty."""
    raise error


class _FolderReader:
    """Finds the files that the options of one model name in the models folder."""

    def __init__(self, folder: Path, model: str, at_source: RecordedFiles) -> None:
        self._folder, self._real_folder, self._model = folder, folder.resolve(), model
        self._at_source = at_source
        self._model_folders: list[Path] = []
        """Folders of the model itself, which a value may be relative to."""

    def find_files(self, option: str, text: str) -> NamedFiles | None:
        """Return the file or folder that the text names; None if it does not exist. Raise Unsendable."""
        for path in self._possible_paths(option, text):
            absent = files_below(path, self._at_source, shards_and_sidecar(path))
            is_here = os.path.lexists(path)
            if not is_here and not absent:
                continue
            relative = path.relative_to(self._folder).as_posix()
            real = self._resolve_inside(path)
            is_folder = real.is_dir() if is_here else str(path) not in absent
            if option == MODEL_FILE:
                self._model_folders = [path, path.parent] if is_folder else [path.parent]
            if not real.exists() and not absent:
                continue  # a link to nothing
            files = list(self._files(path, real))
            files += [self._file_at_source(Path(name), file) for name, file in absent.items()]
            if not files:
                raise Unsendable("is an empty folder")
            return NamedFiles(option, text, relative, tuple(files))
        return None

    def _possible_paths(self, option: str, text: str) -> Iterator[Path]:
        """Yield the paths below the folder that the text may mean, in the order of precedence."""
        if "\0" in text:
            return
        if option not in _NAMED_VALUE_OPTIONS and not os.path.isabs(text):
            path = safe_join(self._folder, text)
            yield from () if path is None else (path,)
            return
        for base in (self._folder, *self._model_folders):
            path = Path(os.path.normpath(base / text))
            if path != self._folder and path.is_relative_to(self._folder):
                yield path

    def _resolve_inside(self, path: Path) -> Path:
        """Resolve the path; raise Unsendable if the result is not below the models folder."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:
            raise Unsendable("is a link that leads nowhere") from error
        if real == self._real_folder or not real.is_relative_to(self._real_folder):
            raise Unsendable("is a link that leads out of the models folder")
        return real

    def _files(self, path: Path, real: Path) -> Iterator[LocalFile]:
        """Yield the file with the files that belong to it, or all files below the folder."""
        if not real.is_dir():
            for part in shards_and_sidecar(path):
                if part.exists():
                    yield self._file(part)
            return
        count = 0
        for base, folders, filenames in os.walk(path, onerror=_raise_walk_error):
            folders.sort()
            for name in without_side_files(filenames):
                count += 1
                if count > MAX_FILES:
                    raise Unsendable(f"has more than {MAX_FILES} files")
                yield self._file(Path(base, name))

    def _file_at_source(self, path: Path, record: RecordedFile) -> LocalFile:
        return LocalFile(self._relative(path), path, record.size, record)

    def _relative(self, path: Path) -> str:
        """Return the path in the models folder; raise Unsendable if it has no key on a worker."""
        relative = path.relative_to(self._folder).as_posix()
        try:
            key_of(self._model, relative)
        except InvalidPath as refusal:
            raise Unsendable(f"{relative}: {refusal}") from refusal
        return relative

    def _file(self, path: Path) -> LocalFile:
        real, relative = self._resolve_inside(path), self._relative(path)
        try:
            status = real.stat()
        except FileNotFoundError as error:
            raise Unsendable(f"{relative}: is a link that leads nowhere") from error
        if not stat.S_ISREG(status.st_mode):
            raise Unsendable(f"{relative}: is no regular file")
        return LocalFile(relative, real, status.st_size)


P = ParamSpec("P")
T = TypeVar("T")


class FileChanged(Exception):
    """The file was replaced or changed since it was planned."""


def stamp_of(status: os.stat_result) -> str:
    """Return a text that identifies this version of the file: size, times and inode."""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


async def in_staging_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run the function in a dedicated thread. A cancelled caller does not wait for its end."""
    return await asyncio.wrap_future(untrusted.in_daemon_thread(function, *args, **kwargs))


class OpenedFile:
    """A file that is opened at the first read, and must still have the given stamp.

    `close` does not block.
    """

    def __init__(self, file: LocalFile, stamp: str, offset: int = 0) -> None:
        self._local_file, self._stamp, self._offset = file, stamp, offset
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None

    async def read(self, most: int, digest: Any = None) -> bytes:
        """Return the next bytes, b"" at the end of the file, and add them to `digest`.

        Raise FileChanged and OSError.
        """
        return await in_staging_thread(self._read, most, digest)

    def close(self) -> None:
        """Close the file after the running read, if any."""
        untrusted.in_daemon_thread(self._close)

    def _read(self, most: int, digest: Any) -> bytes:
        with self._lock:
            if self._file is None:
                self._file = untrusted.open_file(self._local_file.path, follow_links=False)
                self._file.seek(self._offset)
            piece = self._file.read(most)
            if stamp_of(os.fstat(self._file.fileno())) != self._stamp:
                raise FileChanged(f"{self._local_file.relative} was changed meanwhile")
            if digest is not None:
                digest.update(piece)
            return piece

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()


CHUNK = 2**20
RETENTION = timedelta(days=90)
"""Age from which a stored hash is removed, and computed again if needed."""
_SETTLED_AFTER_SECONDS = 2.0
_MAX_PATH_LENGTH = 1024
"""Maximum bytes of a path; the hash of a file with a longer path is not stored."""


class FileHasher:
    """Finds or computes the hash of a file; after `read` has ended, `sha256` and `stamp` are set."""

    def __init__(self, file: LocalFile) -> None:
        self._file, self.sha256, self.stamp, self._changed_at = file, "", "", 0.0

    async def find_stored(self) -> str:
        """Return the stored hash of the file; "" if there is none.

        Raises FileChanged for a file that does not have the planned size, and OSError.
        """
        file, status = self._file, await in_staging_thread(self._file.path.stat)
        self.stamp = stamp_of(status)
        self._changed_at = status.st_ctime_ns / 1e9
        if status.st_size != file.size:
            raise FileChanged(f"{file.relative} was changed meanwhile")
        rows = FileHash.objects.filter(
            path=file.relative, stamp=self.stamp, hashed_at__gte=clock.now() - RETENTION
        )
        stored = await in_thread(rows.values_list("sha256", flat=True).first)
        self.sha256 = stored or ""
        return self.sha256

    async def read(self) -> AsyncIterator[int]:
        """Read the file unless its hash is stored; yield the size of each piece.

        Raises FileChanged for a file that changes meanwhile or does not have the planned size, and OSError.
        """
        if await self.find_stored():
            return
        file = self._file
        began, source, digest = clock.now(), OpenedFile(file, self.stamp), hashlib.sha256()
        try:
            while piece := await source.read(CHUNK, digest):
                yield len(piece)
        finally:
            source.close()
        self.sha256 = digest.hexdigest()
        settled = began.timestamp() - self._changed_at > _SETTLED_AFTER_SECONDS
        if settled and len(file.relative.encode()) <= _MAX_PATH_LENGTH:
            await in_thread(store_hash, file.relative, self.stamp, self.sha256, clock.now())


def store_hash(path: str, stamp: str, sha256: str, now: datetime) -> None:
    """Store the hash of a file with this stamp; remove expired hashes."""
    FileHash.objects.filter(hashed_at__lt=now - RETENTION).delete()
    FileHash.objects.update_or_create(
        path=path, defaults={"stamp": stamp, "sha256": sha256, "hashed_at": now}
    )
