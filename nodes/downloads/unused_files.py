"""Files that no definition and no active import names, and their removal (`model_files_remove`).

On the control plane the unused files are plain files of the models folder, and abandoned downloads. Links,
hidden files, definitions, shares and other file systems are never listed. On a node the unused files are
files that loads have sent for models without a definition; other files of workers are not listed.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from localai_cluster.kit import conf, errors, names
from localai_cluster.kit.quantities import counted, human_bytes
from nodes.definitions.folder import FolderUnresponsive
from nodes.downloads import partial_files
from nodes.loading.file_removal import remove_files
from nodes.loading.files_in_use import FilesInUse, in_folder_thread, is_on_share, read_files_in_use
from nodes.models import BroughtModel, NodeModel
from operations.executor.work import Postpone, Work
from operations.ledger.admission import Admission, OperationRequest, Requester, admit
from operations.ledger.progress import Tick

KIND = "model_files_remove"
MAX_LISTED, MAX_REMOVED = 10_000, 1_000
"""Files of a list, and of one removal."""
MAX_SEEN = 100_000
"""Maximum files of the models folder that one listing examines."""
_DEFINITION_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class UnusedFile:
    """A file that nothing names. `path` is its path in the models folder; on a node, the model's name."""

    path: str
    size: int
    modified_at: datetime


def list_unused(models: Path, in_use: FilesInUse) -> list[UnusedFile]:
    """Return the unused files of the models folder, oldest first, at most `MAX_LISTED`. Blocks.

    Of a larger folder, only the first `MAX_SEEN` files are examined.
    """
    files = [file for file in islice(_iterate_plain_files(models), MAX_SEEN) if not in_use.has(file.path)]
    files += islice(_unused_partials(models, in_use), MAX_LISTED)
    return sorted(files, key=lambda file: (file.modified_at, file.path))[:MAX_LISTED]


def _unused_partials(models: Path, in_use: FilesInUse) -> Iterator[UnusedFile]:
    """Yield the partial downloads of files that nothing uses."""
    for data, path, status in partial_files.partial_files(models):
        if not path or not in_use.has(path):
            yield UnusedFile(
                f"{partial_files.FOLDER}/{data.name}", status.st_size, _modification_time(status)
            )


def _iterate_plain_files(models: Path) -> Iterator[UnusedFile]:
    """Yield the plain files of the folder on its own file system; omit unreadable files."""
    pending: list[Path] = []
    with suppress(OSError):
        device = models.stat().st_dev
        pending = [] if is_on_share(models) else [models]
    while pending:
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError), os.scandir(pending.pop()) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith(".") or names.find_unprintable(entry.name):
                continue
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                relative = Path(entry.path).relative_to(models).as_posix()
                if status.st_dev != device:
                    continue
                if stat.S_ISDIR(status.st_mode) and not is_on_share(Path(entry.path)):
                    pending.append(Path(entry.path))
                elif stat.S_ISREG(status.st_mode) and not (
                    "/" not in relative and entry.name.endswith(_DEFINITION_SUFFIXES)
                ):
                    yield UnusedFile(relative, status.st_size, _modification_time(status))


def _modification_time(status: os.stat_result) -> datetime:
    try:
        return datetime.fromtimestamp(status.st_mtime, UTC)
    except (ValueError, OverflowError):  # some file systems keep times that no calendar has
        return datetime.fromtimestamp(0, UTC)


def list_on_nodes(defined: Collection[str]) -> Mapping[tuple[UUID, str], list[UnusedFile]]:
    """Return, by node, the models with files on the node that nothing defines or runs. Two queries."""
    rows = BroughtModel.objects.exclude(model_name__in=defined).order_by("node__name", "seen_at")
    used = set(NodeModel.objects.values_list("node_id", "model_name"))
    places: dict[tuple[UUID, str], list[UnusedFile]] = {}
    for node_id, node, name, size, seen_at in rows.values_list(
        "node_id", "node__name", "model_name", "size", "seen_at"
    )[:MAX_LISTED]:
        if (node_id, name) not in used:
            places.setdefault((node_id, node), []).append(UnusedFile(name, size, seen_at))
    return places


@dataclass(frozen=True)
class Selection:
    """The files to remove from a list: paths, files older than a time, or the oldest files up to a size."""

    paths: Sequence[str] = ()
    before: datetime | None = None
    bytes_needed: int = 0

    def of(self, files: Sequence[UnusedFile]) -> list[UnusedFile]:
        """Return the selected files, oldest first. Raise NotFound for a path that is not in the list."""
        if self.paths:
            listed = {file.path: file for file in files}
            if missing := next((path for path in self.paths if path not in listed), None):
                raise errors.NotFound(
                    f"{names.to_single_line(missing[:200])} is not among the unused files", field="paths"
                )
            return [listed[path] for path in dict.fromkeys(self.paths)][:MAX_REMOVED]
        old = [file for file in files if self.before is None or file.modified_at < self.before]
        selected: list[UnusedFile] = []
        size = 0
        for file in old:
            if (self.bytes_needed and size >= self.bytes_needed) or len(selected) == MAX_REMOVED:
                break
            selected.append(file)
            size += file.size
        return selected


def request_removal(files: Sequence[UnusedFile], *, by: Requester, now: datetime) -> Admission:
    """Create the removal of files of the models folder. Raise Conflict while another removal is active."""
    size = sum(file.size for file in files)
    request = OperationRequest(
        KIND,
        key=KIND,
        element=counted(len(files), "file"),
        by=by,
        payload={"paths": [file.path for file in files], "bytes": size},
    )
    admission = admit(request, now=now)
    if not admission.created and admission.operation.payload["paths"] != request.payload["paths"]:
        raise errors.Conflict(f"a removal of {admission.operation.element} is running", field="paths")
    return admission


class RemoveFiles:
    """Handler of the operation."""

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Remove the unused files. Raise Conflict while a definition is unusable."""
        try:
            return await self._remove(work)
        except FolderUnresponsive as error:
            raise Postpone(error.message, seconds=30.0) from error

    async def _remove(self, work: Work) -> Mapping[str, Any]:
        models, paths = conf.cluster().models_path, work.operation.payload["paths"]
        in_use = await read_files_in_use()
        if in_use.problem:
            raise errors.Conflict(in_use.problem)
        await work.report(Tick("removing", f"removing {work.operation.element}"))
        freed = await in_folder_thread(_remove_partials, models, paths, in_use)
        files = [path for path in paths if not path.startswith(f"{partial_files.FOLDER}/")]
        removal = await remove_files(files, work.attempt)
        freed += removal.size
        kept = f"; {len(removal.kept)} stay: {next(iter(removal.kept.values()))}" if removal.kept else ""
        return {"message": f"{human_bytes(freed)} freed{kept}", "bytes": freed}


def _remove_partials(models: Path, paths: Collection[str], in_use: FilesInUse) -> int:
    """Remove the partial downloads that no download writes; return their bytes."""
    unused = [file for file in _unused_partials(models, in_use) if file.path in paths]
    return sum(file.size for file in unused if partial_files.remove_partial(models / file.path))
