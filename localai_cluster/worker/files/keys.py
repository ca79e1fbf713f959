"""Where a key leads: `models/…` and `data/…` to their folders, every other one to the staging folder (§12.1).

A key is refused rather than corrected. No key leads out of its folder, also not through links; to a side
file, which would let a sender vouch for bytes; or to what is the worker's own and happens to lie inside.
Everything here but `decoded` looks at the disk and runs in a thread.
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
"""Bytes of a name that leave room for those of its side files."""
EPHEMERAL = "ephemeral"
_HIDDEN = (b"%2f", b"%5c", b"%00")


@dataclass(frozen=True)
class Folders:
    """The three folders that keys lead to, and the worker's own, which they never do."""

    models: Path
    staging: Path
    data: Path
    private: Sequence[Path] = ()

    @classmethod
    def of_worker(cls, models: Path, own: Path, backends: Sequence[Path]) -> Self:
        """The models folder and two beside it. `own` is where the worker keeps its secret.

        That may be called `data` already, and is never served: then the served one has another name.
        """
        data = models.parent / "data"
        if own.resolve().is_relative_to(data.resolve()):
            data = models.parent / "data-files"
        return cls(models, models.parent / "staging", data, (own, *backends))

    def of(self, parts: Sequence[str]) -> tuple[Path, Sequence[str]]:
        """The folder of a key and the way inside."""
        named = {"models": self.models, "data": self.data}
        folder = named.get(parts[0])
        return (folder, parts[1:]) if folder else (self.staging, parts)

    def holds(self, folder: Path, real: Path) -> bool:
        """Whether a path without links lies inside a folder, and in none of the worker's own there."""
        home = folder.resolve()
        own = (path.resolve() for path in self.private)
        hidden = any(real.is_relative_to(path) and path.is_relative_to(home) for path in own)
        return real != home and real.is_relative_to(home) and not hidden


@dataclass(frozen=True)
class FilePlace:
    """What a key names: `local` as engines are told, `real` the same without links, `folder` where it is."""

    local: Path
    real: Path
    folder: Path


def decoded(raw: bytes) -> str:
    """The key in a path. Refusal 400 for what servers and proxies read in different ways."""
    if not raw:
        raise Refusal(400, "key is required")
    if any(code in raw.lower() for code in _HIDDEN):
        raise Refusal(400, "invalid key: an encoded slash or NUL")
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(400, "invalid key: not UTF-8") from None


def locate(folders: Folders, key: str) -> FilePlace:
    """Where the key leads. Refusal 400 if it may not lead there, also if the folder is missing."""
    parts = key.split("/")
    _check(parts)
    folder, inside = folders.of(parts)
    if not inside:
        raise Refusal(400, "invalid key: a folder itself")
    if not folder.is_dir():
        raise Refusal(400, f"the folder {folder} does not exist")
    local = folder.joinpath(*inside)
    try:
        real = Path(os.path.realpath(local))
    except OSError as error:
        raise Refusal(400, f"invalid key: {error.strerror}") from error
    if not folders.holds(folder, real):
        raise Refusal(400, "invalid key: outside the folder")
    _check(real.relative_to(folder.resolve()).parts)  # a link may name a side file
    return FilePlace(local, real, folder)


def is_side_file(name: str) -> bool:
    """Whether a name is that of a side file; a file system may not tell upper from lower case."""
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
