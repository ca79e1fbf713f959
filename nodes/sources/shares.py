"""Models on shares: used in place, read-only, and never copied.

A share's folder (`CLUSTER_SHARE_ROOTS`) is mounted below the models folder. Only files in the share are sent
to workers, and a link that leads out of the share is not followed (`nodes/loading/source_files.py`). A share
may hang, so a dedicated thread reads it.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localai_cluster.kit import names, untrusted
from localai_cluster.kit.errors import InvalidInput, Unavailable
from localai_cluster.kit.settings_table import ClusterSettings
from nodes.definitions.headers import Header, UnreadableHeader, read_config, read_header
from nodes.sources.variants import RepositoryFile, Variant, variants_of

READ_LIMIT = 10.0
MAX_FILES = 10_000


@dataclass(frozen=True)
class SharedVariants:
    """The variants in a folder of a share; `folder` is the folder's path in the models folder."""

    folder: str
    variants: tuple[Variant, ...]
    headers: Mapping[str, Header]
    """By the variant's id."""


async def read_share(settings: ClusterSettings, path: str) -> SharedVariants:
    """Return the models at this path; raise InvalidInput, or Unavailable if the share does not respond."""
    reading = untrusted.in_daemon_thread(_read_or_refuse, settings, path)
    if not await untrusted.wait_until_done(reading, timeout=READ_LIMIT):
        raise Unavailable(f"the share does not answer within {READ_LIMIT:.0f} s", retry_after=30)
    return reading.result()


def _read_or_refuse(settings: ClusterSettings, path: str) -> SharedVariants:
    try:
        return _read_variants(settings, path)
    except OSError as error:
        raise _invalid_path(path, f"cannot be read: {error.strerror or 'the share has failed'}") from None


def _read_variants(settings: ClusterSettings, path: str) -> SharedVariants:
    target, models = _resolve_below_root(settings, path), settings.models_path.resolve()
    base = target if target.is_dir() else target.parent
    files = _list_files(base) if target.is_dir() else [_convert_file(base, target)]
    # No definition and no response can hold a name in another character set than UTF-8.
    found = variants_of([file for file in files if not names.find_unprintable(file.path)])
    if not found:
        raise _invalid_path(path, "has no file of a model")
    headers = {}
    for variant in found:
        try:
            name = variant.main or "config.json"
            header = (read_header if variant.main else read_config)(base / name)
        except (OSError, UnreadableHeader):
            continue
        if header is not None:
            headers[variant.id] = header
    return SharedVariants(base.relative_to(models).as_posix(), tuple(found), headers)


def _resolve_below_root(settings: ClusterSettings, path: str) -> Path:
    """Return the resolved path; raise InvalidInput unless it is in a share root below the models folder."""
    models = settings.models_path.resolve()
    roots = [root.resolve() for root in settings.share_roots]
    try:
        target = (Path("/") / path).resolve() if path.startswith("/") else (models / path).resolve()
    except (OSError, RuntimeError, ValueError):
        raise _invalid_path(path, "cannot be read") from None
    root = next((root for root in roots if target.is_relative_to(root)), None)
    if root is None:
        raise _invalid_path(path, "is in none of the folders that CLUSTER_SHARE_ROOTS lists")
    if root == models or not target.is_relative_to(models):
        raise _invalid_path(path, "is on a share that is not mounted below the models folder")
    if not target.exists():
        raise _invalid_path(path, "does not exist")
    return target


def _list_files(base: Path) -> list[RepositoryFile]:
    found = []
    for folder, _, file_names in os.walk(base):
        for name in file_names:
            path = Path(folder, name)
            if path.is_symlink() and not _is_within(path, base):
                continue
            with suppress(FileNotFoundError):  # it may have gone since
                found.append(_convert_file(base, path))
            if len(found) > MAX_FILES:
                raise _invalid_path(str(base), f"has more than {MAX_FILES} files")
    return found


def _is_within(path: Path, base: Path) -> bool:
    """Return True if the link leads to a file in `base`."""
    try:
        return path.resolve(strict=True).is_relative_to(base)
    except (OSError, RuntimeError):
        return False


def _convert_file(base: Path, path: Path) -> RepositoryFile:
    return RepositoryFile(path.relative_to(base).as_posix(), path.stat().st_size)


def _invalid_path(path: str, problem: str) -> InvalidInput:
    return InvalidInput(f"text: {names.to_single_line(path[:200])} {problem}", field="text")
