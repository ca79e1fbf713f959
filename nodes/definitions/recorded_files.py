"""The files that an import has recorded for a stored definition, with the address, size and hash of each.

A recorded file that is not in the models folder lies at its source: under the policy `worker` an import
leaves it there. Its size, its hash and the figures of its header are those of the record, so placement and
staging need no copy. A worker downloads it from the source, or the control plane does when a load needs it.

A models folder that is not mounted looks as if all its files were deleted. So an import leaves a marker in
the folder, and records of files say that it was there: without it nothing is downloaded.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from localai_cluster.kit.errors import Conflict, Unavailable
from nodes.definitions.headers import Header

MARKER = ".localai-cluster"
"""Name of the file that marks the models folder."""
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
    """Another file has the path of one that is to be downloaded or named."""

    code = "file_exists"


MOST_HEADER_BYTES = 64 * 1024
"""Limit on the JSON of a header in a row; figures of real models have a few KiB."""
_NUL = rb"\u0000"
"""NUL in JSON, which PostgreSQL does not store."""


@dataclass(frozen=True)
class RecordedFile:
    """A file of an import; `header` is that of a GGUF file, without its tensors."""

    path: str
    """Its path in the models folder, present or not."""
    source: str
    """Its lasting address."""
    size: int
    sha256: str
    header: Header | None = None
    is_marked: bool = False
    """True if the models folder had its marker when the file was recorded."""
    has_tools: bool = False
    """True if its chat template is known to have a place for tools."""

    def as_entry(self) -> dict[str, Any]:
        """Return the file as JSON.

        A header that is too large, or has a NUL in its keys, is left out: then the size alone counts.
        """
        entry: dict[str, Any] = {"path": self.path, "size": self.size, "sha256": self.sha256}
        entry["source"] = self.source
        entry |= {name: True for name in ("is_marked", "has_tools") if getattr(self, name)}
        if self.header is None:
            return entry
        figures = {"architecture": self.header.architecture, "figures": self.header.figures}
        header = msgspec.json.encode(figures)
        if len(header) > MOST_HEADER_BYTES or _NUL in header:
            return entry
        return {**entry, "header": msgspec.json.decode(header)}


RecordedFiles = Mapping[str, RecordedFile]
"""Recorded files by their path."""


def parse_entries(entries: Iterable[object]) -> dict[str, RecordedFile]:
    """Return the files of a row; an entry of another version that cannot be read is left out."""
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
    """Return True if these files were recorded in a marked folder, and this one has no marker. Blocks."""
    return any(file.is_marked for file in files) and not os.path.lexists(folder / MARKER)


def mark_folder(folder: Path, files: Iterable[RecordedFile]) -> bool:
    """Mark the folder, in which these files are recorded; return False if it cannot be written. Blocks.

    Raise FolderReplaced if it has lost its marker.
    """
    if lacks_marker(folder, files):
        raise FolderReplaced(folder)
    marker = folder / MARKER
    with suppress(OSError):
        if not os.path.lexists(marker):
            marker.write_text(_MARKER_TEXT)
    return os.path.lexists(marker)


def files_at_source(folder: Path, files: RecordedFiles) -> dict[str, RecordedFile]:
    """Return the files that are not in the folder, by the path that each would have there.

    Blocks. Raise OSError for a folder that cannot be read: then nothing says that a file is not there.
    """
    paths = {f"{folder}/{file.path}": file for file in files.values()}
    return {path: file for path, file in paths.items() if not _is_there(path)}


def _is_there(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def below(path: Path, at_source: RecordedFiles, parts: Iterable[Path]) -> dict[str, RecordedFile]:
    """Return those of `at_source` that are one of `parts` of a file, or lie in a folder of this path."""
    if not at_source:
        return {}
    names = {str(part) for part in parts}
    return {name: file for name, file in at_source.items() if name in names or name.startswith(f"{path}/")}


def without_tensors(header: Header | None) -> Header | None:
    """Return the header of one of several files, the tensors of the others being unknown."""
    return replace(header, tensors=()) if header is not None and header.tensors else header
