"""The installed backends on disk: their names, lookup and removal (worker.md §18.1, §18.2).

A folder with a `run.sh` is a backend. A folder whose metadata has `meta_backend_for` refers to a backend. An
alias is a second name of a backend. The disk is the only state: every call reads it.
"""

import contextlib
import functools
import logging
import secrets
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError, Conflict, InvalidInput, NotFound
from localai_cluster.messaging.messages import decode, omitted
from localai_cluster.worker.hardware import preferred_tokens

STAGED_SUFFIX, BACKUP_SUFFIX, REMOVED_PREFIX, PARTIAL_PREFIX = (
    ".install-tmp",
    ".install-backup",
    ".leaving-",
    ".partial-",
)
MAX_NAME_BYTES = 200
"""Maximum bytes of a backend's folder name; a model id may have twice as many characters."""


def strip_gallery(name: str) -> str:
    """Strip the gallery from `gallery@name`; files are installed under the bare name."""
    return name.rpartition("@")[2].strip()


def folder_name(name: str) -> str:
    """Return the folder name of a backend, with `__` in place of `/`.

    Raise InvalidInput for an unsafe name.
    """
    folder = name.replace("/", "__")
    if not folder:
        raise InvalidInput("backend name is empty", field="backend")
    is_too_long = len(folder.encode()) > MAX_NAME_BYTES
    if folder.startswith(".") or "\\" in folder or not folder.isprintable() or is_too_long:
        raise InvalidInput(f"not a backend name: {name[:80]!r}", field="backend")
    if folder.lower().endswith((STAGED_SUFFIX, BACKUP_SUFFIX)):
        raise InvalidInput(f"not a backend name: {name[:80]!r} is reserved", field="backend")
    return folder


def printable(text: str) -> str:
    """Return an untrusted text in a form that is safe in a log line."""
    return text if text.isprintable() and 0 < len(text) <= 100 else repr(text[:100]) if text else "-"


def model_name(name: str) -> str:
    """Return a model id after checking that a process key may contain it; "" is allowed.

    Raise InvalidInput.
    """
    if len(name) > MAX_NAME_BYTES * 2 or not (name.isprintable() or not name):
        raise InvalidInput("not a model id: too long or not printable", field="model_id")
    return name


log = logging.getLogger(__name__)

START_FILE = "run.sh"
METADATA_FILE = "metadata.json"
PARTIAL_KEEP_SECONDS = 86400.0
"""Seconds for which a partial download is kept, so that a later install can resume it."""


@dataclass(frozen=True)
class Metadata:
    """Content of `metadata.json` in the folder of an installed backend."""

    name: str = omitted("")
    alias: str = omitted("")
    meta_backend_for: str = omitted("")
    gallery_url: str = omitted("")
    installed_at: str = omitted("")
    version: str = omitted("")
    uri: str = omitted("")
    digest: str = omitted("")
    size: int = omitted(0)
    """Bytes of the backend's files; 0 = unknown, as for installs of other workers."""


@dataclass(frozen=True)
class StoredBackend:
    """An installed backend under one of its names, with its folder, start file and metadata."""

    name: str
    folder: Path
    start_file: Path
    metadata: Metadata
    is_system: bool = False
    is_meta: bool = False

    @property
    def is_alias(self) -> bool:
        """True if `name` is an alias, not the backend's own name."""
        return self.metadata.name not in ("", self.name)


class BackendStore:
    """The installed backends of this machine; every call reads the disk."""

    def __init__(self, backends: Path, system: Path, capability: str) -> None:
        self.backends = backends
        self._system = system
        self._capability = capability

    def scan(self) -> dict[str, StoredBackend]:
        """Return the installed backends by name; an alias is a name too.

        Raise OSError if the folder cannot be read.
        """
        entries = {
            folder.name: StoredBackend(folder.name, folder, folder / START_FILE, Metadata(), is_system=True)
            for folder in _list_backend_folders(self._system)
            if (folder / START_FILE).is_file()
        }
        concrete, meta = self._read_folders()
        entries |= concrete
        for entry in meta:
            entries.setdefault(entry.name, entry)
        for name, entry in self._find_aliases(list(concrete.values())).items():
            if name not in entries or entries[name].is_meta:
                entries[name] = entry
        return entries

    def find(self, name: str) -> StoredBackend | None:
        """Return the backend with this name, or else a backend whose name differs only in case."""
        entries = self.scan()
        return entries.get(name) or next((e for n, e in entries.items() if n.lower() == name.lower()), None)

    def start_file(self, name: str) -> Path | None:
        """Return the file that starts `name`, or None (worker.md §10.1)."""
        entry = self.find(name)
        if entry is not None and entry.start_file.is_file():
            return entry.start_file
        with contextlib.suppress(InvalidInput):
            folder = folder_name(name)
            for base in (self.backends, self._system):
                for candidate in (base / folder / START_FILE, base / folder / folder):
                    if candidate.is_file():
                        return candidate
        return None

    def identity(self, name: str) -> frozenset[str]:
        """Return all names of the backend that `name` means: folder, metadata and alias (worker.md §7)."""
        try:
            entry = self.find(name)
        except OSError:
            entry = None
        if entry is None:
            return frozenset({name})
        return frozenset({name, entry.name, entry.metadata.name, entry.metadata.alias} - {""})

    def remove(self, name: str) -> None:
        """Remove the files of `name`; readers see all files or none. Raise NotFound, Conflict, OSError."""
        entry = self.find(name) or next(
            (e for e in self.scan().values() if name and not e.is_meta and e.metadata.name == name), None
        )
        if entry is None:
            raise NotFound(f'backend "{name}" is not installed')
        if entry.is_system:
            raise Conflict(f'backend "{name}" is a system backend and cannot be removed')
        folders = {entry.folder, entry.start_file.parent}
        with contextlib.suppress(InvalidInput):
            folders.add(self.backends / folder_name(name))
        for folder in folders:
            discard(folder)

    def recover(self) -> None:
        """Clean up after a killed worker: remove unfinished installs, restore an old version.

        Partial downloads are kept for a day, because the next install resumes them. A leftover that cannot be
        removed does not keep the worker from starting.
        """
        remove_old_partials(self.backends)
        for path in list(self.backends.iterdir()):
            if path.name.startswith(REMOVED_PREFIX) or path.name.endswith(STAGED_SUFFIX):
                log.info("removing unfinished install %s", path.name)
                discard_leftover(path)
            elif path.name.endswith(BACKUP_SUFFIX):
                target = path.with_name(path.name.removesuffix(BACKUP_SUFFIX))
                if target.exists():
                    discard_leftover(path)
                else:
                    log.warning("an install was interrupted; restoring the previous %s", target.name)
                    path.rename(target)

    def _read_folders(self) -> tuple[dict[str, StoredBackend], list[StoredBackend]]:
        concrete: dict[str, StoredBackend] = {}
        meta = []
        for folder in _list_backend_folders(self.backends):
            metadata = read_metadata(folder)
            if (folder / START_FILE).is_file():
                concrete[folder.name] = StoredBackend(folder.name, folder, folder / START_FILE, metadata)
            elif metadata.meta_backend_for:
                with contextlib.suppress(InvalidInput):
                    target = self.backends / folder_name(metadata.meta_backend_for)
                    name = metadata.name or folder.name
                    meta.append(StoredBackend(name, folder, target / START_FILE, metadata, is_meta=True))
        return concrete, meta

    def _find_aliases(self, concrete: list[StoredBackend]) -> dict[str, StoredBackend]:
        aliases: dict[str, StoredBackend] = {}
        for entry in concrete:
            alias = entry.metadata.alias
            if alias and (
                alias not in aliases or self._build_preference(entry) < self._build_preference(aliases[alias])
            ):
                metadata = entry.metadata
                aliases[alias] = StoredBackend(alias, entry.folder, entry.start_file, metadata)
        return aliases

    def _build_preference(self, entry: StoredBackend) -> int:
        tokens = preferred_tokens(self._capability)
        folder = entry.folder.name.lower()
        return next((rank for rank, token in enumerate(tokens) if token in folder), len(tokens))


def remove_old_partials(folder: Path, in_use: Collection[Path] = ()) -> None:
    """Remove partial downloads that are older than a day and not in use. Raise OSError."""
    cutoff = clock.now().timestamp() - PARTIAL_KEEP_SECONDS
    for path in folder.glob(f"{PARTIAL_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another install may have completed its file
            if path.lstat().st_mtime < cutoff and path not in in_use:
                log.info("removing an old part of a download: %s", path.name)
                path.unlink()


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a backend folder. It is empty if the file is missing or invalid."""
    try:
        with open(folder / METADATA_FILE, "rb") as file:
            return decode(file.read(64 * 1024), Metadata)
    except FileNotFoundError:
        return Metadata()
    except (OSError, ClusterError) as error:
        _warn_once(f"ignoring the metadata of backend {folder.name}: {error}")
        return Metadata()


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    """Log each warning once, because backends are listed every few seconds."""
    log.warning("%s", text)


def discard(path: Path) -> None:
    """Remove a file or a folder. Rename it first, so that readers never see a part. Raise OSError."""
    renamed = path.with_name(f"{REMOVED_PREFIX}{secrets.token_hex(6)}")
    try:
        path.rename(renamed)
    except FileNotFoundError:
        return
    if renamed.is_dir() and not renamed.is_symlink():
        shutil.rmtree(renamed)
    else:
        renamed.unlink()


def discard_leftover(path: Path) -> None:
    """Remove a file or a folder that nothing uses; log a failure. The next start tries again."""
    try:
        discard(path)
    except (OSError, RecursionError) as error:
        log.warning("cannot remove %s: %s", path, error)


def _list_backend_folders(base: Path) -> Iterator[Path]:
    try:
        paths = sorted(base.iterdir())
    except FileNotFoundError:
        return
    for path in paths:
        if (
            not path.name.startswith(".")
            and not path.name.endswith((STAGED_SUFFIX, BACKUP_SUFFIX))
            and path.is_dir()
        ):
            yield path
