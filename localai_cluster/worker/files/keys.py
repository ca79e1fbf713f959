"""Resolution of keys: `models/…` and `data/…` lead to their folders, every other key to staging (§12.1).

A bad key is refused rather than corrected. No key leads out of its folder, not even through links; nor to a
side file, through which a sender could record a false hash; nor to the worker's own files inside a served
folder. All functions here except `decoded` read the disk and run in a thread.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote_to_bytes

from localai_cluster.worker.exchange import Refusal

HASH, TARGET = ".sha256", ".sha256.target"
LONGEST_NAME = 255 - len(TARGET)
"""Maximum bytes of a name, so that the names of its side files fit as well."""
EPHEMERAL = "ephemeral"
_HIDDEN = (b"%2f", b"%5c", b"%00")


@dataclass(frozen=True)
class Folders:
    """The three served folders, and the worker's private folders, which are never served."""

    models: Path
    staging: Path
    data: Path
    private: Sequence[Path] = ()

    @classmethod
    def of_worker(cls, models: Path, own: Path, backends: Sequence[Path]) -> Self:
        """Create the layout of a worker: the models folder and two folders beside it.

        `own` is the folder of the worker's secret, which is never served. If that one is called `data`, the
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
        """Return True if a path without links lies inside `folder` and in no private folder there."""
        home = folder.resolve()
        private = (path.resolve() for path in self.private)
        hidden = any(real.is_relative_to(path) and path.is_relative_to(home) for path in private)
        return real != home and real.is_relative_to(home) and not hidden


@dataclass(frozen=True)
class ResolvedKey:
    """A resolved key: `local` is the path for engines, `real` the same without links, `folder` its root."""

    local: Path
    real: Path
    folder: Path


def decoded(raw: bytes) -> str:
    """Decode the key in a URL path. Raise Refusal 400 for forms that servers and proxies read differently."""
    if not raw:
        raise Refusal(400, "key is required")
    if any(code in raw.lower() for code in _HIDDEN):
        raise Refusal(400, "invalid key: an encoded slash or NUL")
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(400, "invalid key: not UTF-8") from None


def locate(folders: Folders, key: str) -> ResolvedKey:
    """Resolve a key. Raise Refusal 400 if it leads to a forbidden path or its folder does not exist."""
    parts = key.split("/")
    _check(parts)
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
    _check(real.relative_to(folder.resolve()).parts)  # a link may name a side file
    return ResolvedKey(local, real, folder)


def is_side_file(name: str) -> bool:
    """Return True if this is the name of a side file; case-insensitive, as some file systems are."""
    return name.lower().endswith((HASH, TARGET))


def _check(parts: Sequence[str]) -> None:
    for part in parts:
        if part in ("", ".", ".."):
            raise Refusal(400, "invalid key: an empty part, or one of dots")
        if any(ord(character) < 32 or ord(character) == 127 for character in part):
            raise Refusal(400, "invalid key: a control character")
        if len(part.encode()) > LONGEST_NAME:
            raise Refusal(400, f"invalid key: a name of more than {LONGEST_NAME} bytes")
        if is_side_file(part):
            raise Refusal(400, "invalid key: a side file")
