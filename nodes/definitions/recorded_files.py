"""The files that an import has recorded for a stored definition: address, size and hash of each.

A recorded file that is not in the models folder is at its source: under the policy `worker`
(`CLUSTER_DOWNLOAD_ON`, or `download_on` of a definition) an import leaves it there. The record contains its
size, its hash and the figures of its header, so placement and staging need no copy. A worker downloads the
file from its source, or the control plane does when a load needs it.

A models folder that is not mounted looks as if all its files were deleted. So an import creates a marker in
the folder, and records of files state that the folder had the marker: in a folder that has lost its marker
nothing is downloaded.
"""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from localai_cluster.kit import conf
from localai_cluster.kit.errors import Conflict, Unavailable
from localai_cluster.kit.outbound import host_of
from nodes.definitions.headers import Header

MARKER = ".localai-cluster"
"""Name of the file by which the models folder is recognised."""
_MARKER_TEXT = "This marks the models folder of LocalAI Cluster. A folder without it counts as not mounted.\n"
LACKS_MARKER = (
    f"has no file {MARKER}, which an import has left there: is it mounted? If this is the right folder,"
    " create the file"
)


class FolderReplaced(Unavailable):
    """The models folder lacks its marker."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the models folder {folder.name!r} of the control plane {LACKS_MARKER}")


class FileConflict(Conflict):
    """A file that is to be downloaded or named has the path of a different file."""

    code = "file_exists"


MAX_HEADER_BYTES = 64 * 1024
"""Maximum bytes of a header as JSON in a row; the figures of real models have a few KiB."""
_JSON_NUL = rb"\u0000"
"""NUL as JSON escapes it; PostgreSQL cannot store it."""


@dataclass(frozen=True)
class RecordedFile:
    """A file that an import has recorded; `header` is its GGUF header without tensors."""

    path: str
    """Path of the file in the models folder, even if the file is only at its source."""
    source: str
    """Permanent address of the file at its source."""
    size: int
    sha256: str
    header: Header | None = None
    is_marked: bool = False
    """True if the models folder had its marker when the import recorded the file."""
    has_tools: bool = False
    """True if the chat template in the file is known to support tools."""

    def as_entry(self) -> dict[str, Any]:
        """Return the file as JSON.

        A header that is too large, or has a NUL in its keys, is omitted: then only the size is known.
        """
        entry: dict[str, Any] = {"path": self.path, "size": self.size, "sha256": self.sha256}
        entry["source"] = self.source
        entry |= {name: True for name in ("is_marked", "has_tools") if getattr(self, name)}
        if self.header is None:
            return entry
        figures = {"architecture": self.header.architecture, "figures": self.header.figures}
        header = msgspec.json.encode(figures)
        if len(header) > MAX_HEADER_BYTES or _JSON_NUL in header:
            return entry
        return {**entry, "header": msgspec.json.decode(header)}


RecordedFiles = Mapping[str, RecordedFile]
"""Recorded files by their path in the models folder."""


def parse_entries(entries: Iterable[object]) -> dict[str, RecordedFile]:
    """Return the recorded files of a row.

    Unreadable entries are left out: another version may have written them.
    """
    files: dict[str, RecordedFile] = {}
    for entry in entries:
        try:
            file = msgspec.convert(entry, RecordedFile)
        except msgspec.ValidationError:
            continue
        if file.path and file.source and file.sha256 and file.size > 0:
            files[file.path] = file
    return files


def lacks_marker(folder: Path, files: Iterable[RecordedFile]) -> bool:
    """Return True if `folder` has no marker, but a file was recorded in a folder with one. Blocks."""
    return any(file.is_marked for file in files) and not os.path.lexists(folder / MARKER)


def mark_folder(folder: Path, files: Iterable[RecordedFile]) -> bool:
    """Create the marker in the folder that has these files; return False if it cannot be written. Blocks.

    Raise FolderReplaced if the folder has lost its marker.
    """
    if lacks_marker(folder, files):
        raise FolderReplaced(folder)
    marker = folder / MARKER
    with suppress(OSError):
        if not os.path.lexists(marker):
            marker.write_text(_MARKER_TEXT)
    return os.path.lexists(marker)


def files_at_source(folder: Path, files: RecordedFiles) -> dict[str, RecordedFile]:
    """Return the recorded files that are not in the folder, by the absolute path that they would have.

    Blocks. Raise OSError if the folder cannot be read, because it is then unknown which files are missing.
    """
    paths = {f"{folder}/{file.path}": file for file in files.values()}
    return {path: file for path, file in paths.items() if not _exists(path)}


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def files_below(path: Path, at_source: RecordedFiles, parts: Iterable[Path]) -> dict[str, RecordedFile]:
    """Return those of the files in `at_source` that are one of `parts` or lie below the folder `path`."""
    if not at_source:
        return {}
    names = {str(part) for part in parts}
    return {name: file for name, file in at_source.items() if name in names or name.startswith(f"{path}/")}


def without_tensors(header: Header | None) -> Header | None:
    """Return the header without tensors, because those of the model's other files are unknown."""
    return replace(header, tensors=()) if header is not None and header.tensors else header


_SCHEMES = ("https://", "http://", "hf://")
_PINNED_URL = re.compile(r"hf://[^@]+@[0-9a-f]{40}/")


@dataclass(frozen=True)
class FileSource:
    """The permanent address of a file, and its hash."""

    url: str
    sha256: str

    @property
    def host(self) -> str:
        """The host of the address, with its port; `Hugging Face` for `hf://`: the worker chooses the host."""
        return host_of(self.url)[:255] or "Hugging Face"


def downloads_on_worker(download_on: str) -> bool:
    """Return True if workers are to download the files of a definition with this `download_on`."""
    return (download_on or conf.cluster().download_on) == "worker"


def can_fetch(url: str) -> bool:
    """Return True if workers can read this kind of address."""
    return url.startswith(_SCHEMES)


def is_lasting(url: str) -> bool:
    """Return True if workers can read the address and its content cannot change (no branch of the hub)."""
    return can_fetch(url) and (not url.startswith("hf://") or _PINNED_URL.match(url) is not None)


def sources_for_worker(files: RecordedFiles, download_on: str) -> dict[str, FileSource]:
    """Return, by path, the sources of the files that workers fetch."""
    if not downloads_on_worker(download_on):
        return {}
    return {
        path: FileSource(file.source, file.sha256) for path, file in files.items() if can_fetch(file.source)
    }
