"""Resolution of keys: `models/…` and `data/…` are in their folders, all other keys in staging (§12.1).

An invalid key is refused, never corrected. No key leads out of its folder, not even through links. No key
leads to a side file, through which a sender could record a false hash, or to the worker's own files inside of
a served folder. `remove_old_staged_files` removes files that were staged for single requests after a day;
without it (as in the reference) the disk fills. All functions except `decode_key` read the disk and run in a
thread.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self
from urllib.parse import unquote_to_bytes

from localai_cluster.worker.exchange import Refusal

HASH_SUFFIX, TARGET_SUFFIX = ".sha256", ".sha256.target"
MAX_NAME_LENGTH = 255 - len(TARGET_SUFFIX)
"""Maximum bytes of a file name: the names of its side files must fit as well."""
EPHEMERAL_FOLDER = "ephemeral"
_REFUSED_ENCODINGS = (b"%2f", b"%5c", b"%00")


@dataclass(frozen=True)
class Folders:
    """The three served folders, and the worker's private folders, which are never served."""

    models: Path
    staging: Path
    data: Path
    private: Sequence[Path] = ()

    @classmethod
    def of_worker(cls, models: Path, own: Path, backends: Sequence[Path]) -> Self:
        """Return the folders of a worker: the models folder and two folders beside it.

        `own` is the folder of the worker's secret, which is never served. If `own` has the name `data`, the
        served folder gets another name.
        """
        data = models.parent / "data"
        if own.resolve().is_relative_to(data.resolve()):
            data = models.parent / "data-files"
        return cls(models, models.parent / "staging", data, (own, *backends))

    def of(self, parts: Sequence[str]) -> tuple[Path, Sequence[str]]:
        """Return the folder of a key and the path inside it."""
        folders = {"models": self.models, "data": self.data}
        folder = folders.get(parts[0])
        return (folder, parts[1:]) if folder else (self.staging, parts)

    def holds(self, folder: Path, real: Path) -> bool:
        """Return True if a path without links is inside `folder` and in no private folder."""
        home = folder.resolve()
        private = (path.resolve() for path in self.private)
        hidden = any(real.is_relative_to(path) and path.is_relative_to(home) for path in private)
        return real != home and real.is_relative_to(home) and not hidden


@dataclass(frozen=True)
class ResolvedKey:
    """A resolved key: `local` is the path for engines, `real` the same path without links.

    `folder` is the served folder that contains the path.
    """

    local: Path
    real: Path
    folder: Path


def decode_key(raw: bytes) -> str:
    """Decode the key in a URL path. Raise Refusal 400 for an encoding that proxies read differently."""
    if not raw:
        raise Refusal(400, "key is required")
    if any(code in raw.lower() for code in _REFUSED_ENCODINGS):
        raise Refusal(400, "invalid key: an encoded slash or NUL")
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(400, "invalid key: not UTF-8") from None


def resolve_key(folders: Folders, key: str) -> ResolvedKey:
    """Resolve a key. Raise Refusal 400 for a forbidden path or if the served folder does not exist."""
    parts = key.split("/")
    _refuse_forbidden_parts(parts)
    folder, path_parts = folders.of(parts)
    if not path_parts:
        raise Refusal(400, "invalid key: a folder itself")
    if not folder.is_dir():
        raise Refusal(400, f"the folder {folder} does not exist")
    local = folder.joinpath(*path_parts)
    try:
        real = Path(os.path.realpath(local))
    except OSError as error:
        raise Refusal(400, f"invalid key: {error.strerror}") from error
    if not folders.holds(folder, real):
        raise Refusal(400, "invalid key: outside the folder")
    _refuse_forbidden_parts(real.relative_to(folder.resolve()).parts)  # a link may name a side file
    return ResolvedKey(local, real, folder)


def is_side_file(name: str) -> bool:
    """Return True if this is the name of a side file. Ignore case, as some file systems do."""
    return name.lower().endswith((HASH_SUFFIX, TARGET_SUFFIX))


def _refuse_forbidden_parts(parts: Sequence[str]) -> None:
    for part in parts:
        if part in ("", ".", ".."):
            raise Refusal(400, "invalid key: an empty part, or one of dots")
        if any(ord(character) < 32 or ord(character) == 127 for character in part):
            raise Refusal(400, "invalid key: a control character")
        if len(part.encode()) > MAX_NAME_LENGTH:
            raise Refusal(400, f"invalid key: a name of more than {MAX_NAME_LENGTH} bytes")
        if is_side_file(part):
            raise Refusal(400, "invalid key: a side file")


STAGED_FILE_MAX_AGE = timedelta(days=1)
REMOVAL_INTERVAL_SECONDS = 3600.0
TEMPORARY_PREFIX, TEMPORARY_SUFFIX = "localai-output-", ".tmp"


def remove_old_staged_files(staging: Path, now: datetime, uploading: Callable[[Path], bool]) -> int:
    """Remove files and empty folders unchanged for `STAGED_FILE_MAX_AGE`; return the number of removed files.

    Only the file server's own files are removed, `ephemeral/…` and temporary output files: a folder called
    `staging` beside the models may hold files of other programs. A file that is being uploaded stays. A
    folder whose last file is removed stays for another day.
    """
    cutoff, removed, staging = (now - STAGED_FILE_MAX_AGE).timestamp(), 0, staging.resolve()
    for path in _iterate_own_files(staging):
        with contextlib.suppress(OSError):  # in use, not permitted, or already removed: the next pass retries
            status = path.lstat()
            if max(status.st_mtime, status.st_ctime) >= cutoff or uploading(path):
                continue
            if stat.S_ISDIR(status.st_mode):
                path.rmdir()
            else:
                path.unlink()
                removed += 1
    return removed


def _iterate_own_files(staging: Path) -> Iterator[Path]:
    """Yield files, and folders after the files that they contain; do not follow links."""
    ephemeral = staging / EPHEMERAL_FOLDER
    if not ephemeral.is_symlink():
        for folder, names, files in os.walk(ephemeral, topdown=False):
            yield from (Path(folder, name) for name in (*files, *names))
    with contextlib.suppress(OSError):
        for path in staging.iterdir():
            if path.name.startswith(TEMPORARY_PREFIX) and not path.is_dir():
                yield path
