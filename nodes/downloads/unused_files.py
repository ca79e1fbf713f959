"""Files that no definition and no running import names, and their removal (`model_files_remove`).

On the control plane these are plain files of the models folder, and downloads that nobody resumes. Links,
hidden files, definitions, shares and other file systems are not ours and are never listed. On a node they are
the files that loads have sent for models which nothing defines any more: workers list no others.

The removal takes the files out of the way, looks again whether anything names them now, and only then deletes
them. An import that begins in between either sees its file gone, or is seen: then the file returns. A removal
that was interrupted is repeated, and ends what the former one began.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from localai_cluster.kit import conf, errors, failpoints, names
from localai_cluster.messaging.messages import human_bytes
from nodes.definitions import sizes
from nodes.definitions.files import Definition
from nodes.definitions.folder import folder
from nodes.downloads import partial_files
from nodes.downloads.imports import NamedPaths, paths_of_active_imports
from nodes.loading.source_files import in_staging_thread
from nodes.models import BroughtModel, ModelDefinition, NodeModel
from operations.executor.work import Work, in_thread
from operations.ledger.admission import Admission, OperationRequest, admit
from operations.ledger.progress import Tick

KIND = "model_files_remove"
MOST_LISTED, MOST_REMOVED = 10_000, 1_000
"""Files of a list, and of one removal."""
_SET_ASIDE = ".removed"
_DEFINITIONS = (".yaml", ".yml")


@dataclass(frozen=True)
class UnusedFile:
    """A file that nothing names: of the models folder by its path, on a node by the model's name."""

    path: str
    size: int
    modified_at: datetime


@dataclass(frozen=True)
class Named:
    """What is named by definitions, in force or not, and by running imports."""

    paths: NamedPaths
    imported: Collection[str]
    """Files of running imports, and those that stored definitions have fetched."""
    problem: str
    """Why other files may be named too, so that nothing may be removed; "" = they are not."""

    def has(self, path: str) -> bool:
        """Return True if something names the file, or the one whose checksum it has."""
        plain = next((path.removesuffix(side) for side in sizes.SIDES if path.endswith(side)), path)
        return self.paths.has(plain) or plain in self.imported


async def read_named() -> Named:
    """Return what is named now. Raise FolderUnresponsive."""
    # Imports first: one that ends meanwhile has saved its definition before.
    imported = await in_thread(paths_of_active_imports)
    fetched = await in_thread(_paths_of_stored_definitions)
    known = await folder().known()
    usable = [entry for entry in known if isinstance(entry, Definition)]
    problem = await _problem(len(known) - len(usable))
    return Named(NamedPaths(conf.cluster().models_path, usable), imported | fetched, problem)


def _paths_of_stored_definitions() -> set[str]:
    """Return the files that imports of stored definitions have fetched; one query."""
    lists = ModelDefinition.objects.filter(deleted_at__isnull=True).values_list("files", flat=True)
    return {file["path"] for files in lists for file in files}


async def _problem(unusable: int) -> str:
    problems = await folder().problems()
    if problems.folder:
        return f"the models folder {problems.folder}"
    if not unusable:
        return ""
    source = next(iter(problems.files), "a definition that is not in force")
    return f"{source} cannot be used and may name any of the files: repair or remove it first"


def list_unused(models: Path, named: Named) -> list[UnusedFile]:
    """Return the unused files of the models folder, the oldest first, `MOST_LISTED` at most. Blocks."""
    files = [file for file in _files(models) if not named.has(file.path)]
    for data, path, status in partial_files.partial_files(models):
        if not path or not named.has(path):
            relative = f"{partial_files.FOLDER}/{data.name}"
            files.append(UnusedFile(relative, status.st_size, _time(status)))
        if len(files) >= MOST_LISTED:
            break
    return sorted(files, key=lambda file: (file.modified_at, file.path))[:MOST_LISTED]


def _files(models: Path) -> Iterator[UnusedFile]:
    """Yield the plain files of the folder, on its own file system."""
    device, pending = models.stat().st_dev, [] if _is_on_share(models) else [models]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_own = not entry.name.startswith(".") and not names.unprintable(entry.name)
                status = entry.stat(follow_symlinks=False)
                relative = Path(entry.path).relative_to(models).as_posix()
                if not is_own or status.st_dev != device:
                    continue
                if stat.S_ISDIR(status.st_mode) and not _is_on_share(Path(entry.path)):
                    pending.append(Path(entry.path))
                elif stat.S_ISREG(status.st_mode) and not (
                    "/" not in relative and entry.name.endswith(_DEFINITIONS)
                ):
                    yield UnusedFile(relative, status.st_size, _time(status))


def _is_on_share(folder: Path) -> bool:
    """Return True if the folder is on a share that the settings list: nothing is ever removed there."""
    return any(folder.resolve().is_relative_to(root.resolve()) for root in conf.cluster().share_roots)


def _time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, UTC)


def list_on_nodes(defined: Collection[str]) -> Mapping[tuple[UUID, str], list[UnusedFile]]:
    """Return by node the models whose files a load has sent there, and which nothing defines or runs.

    Two queries.
    """
    rows = BroughtModel.objects.exclude(model_name__in=defined).order_by("node__name", "seen_at")
    used = set(NodeModel.objects.values_list("node_id", "model_name"))
    places: dict[tuple[UUID, str], list[UnusedFile]] = {}
    for node_id, node, name, size, seen_at in rows.values_list(
        "node_id", "node__name", "model_name", "size", "seen_at"
    )[:MOST_LISTED]:
        if (node_id, name) not in used:
            places.setdefault((node_id, node), []).append(UnusedFile(name, size, seen_at))
    return places


@dataclass(frozen=True)
class Selection:
    """What to remove of the listed files: paths, those older than a time, or the oldest of so many bytes."""

    paths: Sequence[str] = ()
    before: datetime | None = None
    bytes_needed: int = 0

    def of(self, files: Sequence[UnusedFile]) -> list[UnusedFile]:
        """Return the selected files of a list, the oldest first. NotFound for a path that it lacks."""
        if self.paths:
            listed = {file.path: file for file in files}
            if missing := next((path for path in self.paths if path not in listed), None):
                raise errors.NotFound(
                    f"{names.plain(missing[:200])} is not among the unused files", field="paths"
                )
            return [listed[path] for path in dict.fromkeys(self.paths)][:MOST_REMOVED]
        old = [file for file in files if self.before is None or file.modified_at < self.before]
        selected: list[UnusedFile] = []
        size = 0
        for file in old:
            if (self.bytes_needed and size >= self.bytes_needed) or len(selected) == MOST_REMOVED:
                break
            selected.append(file)
            size += file.size
        return selected


def request_removal(
    files: Sequence[UnusedFile], *, actor: str, now: datetime, request_id: str = "", client_address: str = ""
) -> Admission:
    """Create the removal of files of the models folder. Raise Conflict while another one is running."""
    size = sum(file.size for file in files)
    request = OperationRequest(
        KIND,
        key=KIND,
        element=f"{len(files)} file{'' if len(files) == 1 else 's'}",
        actor=actor,
        payload={"paths": [file.path for file in files], "bytes": size},
        request_id=request_id,
        client_address=client_address,
    )
    admission = admit(request, now=now)
    if not admission.created and admission.operation.payload["paths"] != request.payload["paths"]:
        raise errors.Conflict(f"a removal of {admission.operation.element} is running", field="paths")
    return admission


class RemoveFiles:
    """Handler of the operation."""

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Remove the files that nothing names. Raise Conflict while a definition cannot be used."""
        models, paths = conf.cluster().models_path, work.operation.payload["paths"]
        named = await read_named()
        if named.problem:
            raise errors.Conflict(named.problem)
        await work.report(Tick("removing", f"removing {work.operation.element}"))
        await in_staging_thread(_set_aside, models, [path for path in paths if not named.has(path)])
        failpoints.passed("files.removal:set_aside")
        freed, kept = await in_staging_thread(_delete, models, await read_named())
        note = f"; {kept} are in use again and stay" if kept else ""
        return {"message": f"{human_bytes(freed)} freed{note}", "bytes": freed}


def _set_aside(models: Path, paths: Sequence[str]) -> None:
    """Move the files out of the way; remove downloads that nobody writes."""
    for path in paths:
        source, target = models / path, models / _SET_ASIDE / path
        if not _is_own(models, path):
            continue
        if path.startswith(f"{partial_files.FOLDER}/"):
            partial_files.remove_partial(source)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            source.rename(target)


def _is_own(models: Path, path: str) -> bool:
    """Return True if this is a plain file of the models folder, and not one that a link leads to."""
    file = sizes.path_inside(models, path)
    if (
        file is None
        or not file.parent.resolve().is_relative_to(models.resolve())
        or _is_on_share(file.parent)
    ):
        return False
    try:
        status = file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_dev == models.stat().st_dev


def _delete(models: Path, named: Named) -> tuple[int, int]:
    """Delete what was set aside, also by a former attempt; return the bytes that are free now.

    What is named meanwhile returns, unless it has been downloaded again; the second figure is their number.
    """
    root, freed, kept = models / _SET_ASIDE, 0, 0
    for base, _, filenames in os.walk(root, topdown=False):
        for name in filenames:
            file = Path(base, name)
            path = file.relative_to(root).as_posix()
            size = file.lstat().st_size
            if (named.has(path) or named.problem) and not (models / path).exists():
                (models / path).parent.mkdir(parents=True, exist_ok=True)
                file.rename(models / path)
                kept += 1
                continue
            file.unlink(missing_ok=True)
            freed += size
            _remove_empty_folders(models, (models / path).parent)
        with suppress(OSError):
            os.rmdir(base)
    return freed, kept


def _remove_empty_folders(models: Path, parent: Path) -> None:
    while parent != models:
        try:
            os.rmdir(parent)
        except OSError:
            return
        parent = parent.parent
