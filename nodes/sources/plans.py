"""Plans of imports: the definition that is saved and the files that are fetched first. Pure.

A plan is the payload of an operation, so it outlives its process. Its addresses can be opened at any time:
they are not signed and contain no token. Paths come from other machines; `check_path` admits only a path that
names one plain file below the models folder.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from localai_cluster.kit import errors, names
from nodes.definitions.sizes import SIDES
from nodes.loading.source_files import InvalidPath, key_of

MAX_FILES = 2000
"""Maximum files of one import."""
MAX_PATH_LENGTH, MAX_PART_LENGTH, MAX_PARTS = 512, 180, 12
"""Bytes of a path and of one of its parts, and parts; a partial file's name needs the rest of 255 bytes."""
MAX_URL_LENGTH, MAX_BYTES = 4096, 2**48
"""Characters of an address; bytes of a file. The sum over `MAX_FILES` is still a number of 64 bits."""
SHARE_PREFIX = "share://"
"""Prefix of the address of a file on a share; such a file is used in place and not fetched."""
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
_DEFINITION_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class SourceFile:
    """A file to fetch. `size` 0 = unknown, `sha256` "" = unknown."""

    path: str
    """The file's path in the models folder."""
    url: str
    """`https://…`, `hf://owner/repo@commit/path`, `oci://host/repo@sha256:…`, `s3://…` or `share://…`."""
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class ImportPlan:
    """The plan of an import: fetch the files, then save the definition."""

    name: str
    text: str
    """The definition as YAML."""
    files: tuple[SourceFile, ...]
    origin: str
    """`gallery`, `import`, `api` or `editor`."""
    source: str
    """The displayable address of the model's source."""

    def as_payload(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return asdict(self)


def from_payload(payload: Mapping[str, Any]) -> ImportPlan:
    """Parse the payload that `as_payload` has returned."""
    files = tuple(SourceFile(**file) for file in payload["files"])
    return ImportPlan(payload["name"], payload["text"], files, payload["origin"], payload["source"])


def check_path(path: str) -> str:
    """Return the path of a file for the models folder; raise InvalidInput for a forbidden path.

    Forbidden are paths that lead out of the folder, hidden files, names that an operating system reserves,
    checksum files, and YAML files directly in the folder, which would be definitions.
    """
    try:
        key_of("model", path)
    except InvalidPath as error:
        raise _invalid_path(path, str(error)) from None
    parts = PurePosixPath(path).parts
    if len(parts) > MAX_PARTS or len(path.encode()) > MAX_PATH_LENGTH:
        raise _invalid_path(path, "is too long")
    for part in parts:
        if len(part.encode()) > MAX_PART_LENGTH:
            raise _invalid_path(path, f"has a part of more than {MAX_PART_LENGTH} bytes")
        if part.startswith(".") or part != part.strip() or part.endswith("."):
            raise _invalid_path(path, "has a hidden name, or one with blanks or dots around it")
        if PureWindowsPath(part).is_reserved() or ":" in part:
            raise _invalid_path(path, "has a reserved name")
    lowered = path.lower()
    if lowered.endswith(SIDES) or (len(parts) == 1 and lowered.endswith(_DEFINITION_SUFFIXES)):
        raise _invalid_path(path, "has the name of a definition or a checksum file")
    return path


def check_files(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    """Return the files; raise InvalidInput for a wrong path, hash or number of files, or a duplicate name.

    Names that differ only in case or in look-alike characters count as duplicates, because some file systems
    cannot hold both.
    """
    listed = tuple(files)
    if len(listed) > MAX_FILES:
        raise errors.InvalidInput(
            f"it has {len(listed)} files; at most {MAX_FILES} are fetched", field="text"
        )
    seen: dict[str, str] = {}
    for file in listed:
        check_path(file.path)
        if len(file.url) > MAX_URL_LENGTH or file.size < 0 or file.size >= MAX_BYTES:
            raise _invalid_path(file.path, "has an address or a size that is out of range")
        if file.sha256 and not _SHA256_PATTERN.fullmatch(file.sha256):
            raise _invalid_path(file.path, "has a hash that is not a SHA-256")
        if (key := names.key(file.path)) in seen:
            raise _invalid_path(file.path, f"has the name of another file, {seen[key][:100]!r}")
        seen[key] = file.path
    _check_folders(listed)
    return listed


def _check_folders(files: tuple[SourceFile, ...]) -> None:
    """Raise InvalidInput if the path of one file is a folder of another file."""
    paths = {file.path for file in files}
    for file in files:
        for folder in PurePosixPath(file.path).parents:
            if str(folder) in paths:
                raise _invalid_path(str(folder), "is a file and a folder")


def _invalid_path(path: str, problem: str) -> errors.InvalidInput:
    shown = names.to_single_line(path[:100])
    return errors.InvalidInput(f"the file {shown!r} {problem}", field="text")
