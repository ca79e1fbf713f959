"""The operation `definition_delete`: it unloads a model, then deletes its definition and, if asked, files.

It owns the model as an unload of the cluster does, so no load begins before the definition is gone. The row
is deleted under the attempt's fence when every replica has gone; an attempt that is repeated goes on with the
files. A file goes only if no other definition and no running import names it; a link and what it leads to,
and files on another device than the models folder, are not ours and stay. A stored definition over which a
file wins has no replicas of its own: only the row is deleted.
"""

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from localai_cluster.kit import clock, conf, errors, failpoints, untrusted
from localai_cluster.kit.commit_hooks import committed
from nodes.definitions import rows, sizes, store
from nodes.definitions.files import Definition, UnusableDefinition, parse_file
from nodes.definitions.folder import Folder, folder
from nodes.loading.source_files import named_texts
from nodes.models import ModelDefinition
from nodes.models.replica import ALL_SUFFIX, load_key
from nodes.replicas import drains
from nodes.replicas.unload_requests import UnloadModel, record_unload
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger.admission import Admission, OperationRequest, admit
from operations.ledger.attempts import owned
from operations.ledger.progress import Tick
from operations.models import Operation

KIND = drains.REMOVE
FILES_WITHIN = 60.0
"""Seconds that the removal of files may take."""
IMPORT = "model_import"
"""Kind of the operation that fetches the files of a model."""
_SHOWN = 100


@dataclass(frozen=True)
class RemovalRequest:
    """The request to delete a stored definition, and its actor."""

    name: str
    actor: str
    with_files: bool = False
    request_id: str = ""
    client_address: str = ""


def request_removal(request: RemovalRequest, *, now: datetime) -> Admission:
    """Delete the stored definition; join the active operation that does so.

    Raises NotFound, and Conflict for a model that only a file defines, or that is being loaded or unloaded.
    """
    name = request.name
    row, file = store.find(name), store.file_of(name)
    if row is None:
        store.require_no_file(name)
        raise errors.NotFound(f"there is no stored definition of {name}")
    replicas = drains.unloadable(name).order_by("node__name") if not file else drains.unloadable(name).none()
    admission = admit(
        OperationRequest(
            KIND,
            key=f"definition:{name}" if file else load_key(name, ALL_SUFFIX),
            element=name,
            actor=request.actor,
            payload={
                "model": name,
                "definition": str(row.id),
                "files": request.with_files,
                "grace": conf.cluster().unload_grace,
                "replica_index": None,
            },
            targets=list(replicas.values_list("node_id", "node__name").distinct()),
            request_id=request.request_id,
            client_address=request.client_address,
        ),
        now=now,
    )
    if admission.created and not file:
        because = f"deletion of its definition asked for by {request.actor}"
        record_unload(name, admission.operation.id, because=because, node_id=None, index=None, now=now)
    return admission


class RemoveDefinition(UnloadModel):
    """Handler; the replicas go first."""

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the removal; raise CommandFailed if a replica may still run, Postpone if the folder hangs."""
        unloaded = await super().__call__(work) or {}
        name, payload = work.operation.element, work.operation.payload
        row = await in_thread(_remove_row, work)
        if not payload["files"] or row is None:
            return {**unloaded, "message": f"the definition of {name} is deleted"}
        await work.report(Tick("deleting", f"removing the files of {name}"))
        removal = await _remove_files(folder(), row, await in_thread(_imported_paths))
        failpoints.passed("definitions.files")
        kept = f"; {len(removal.kept)} stay: {next(iter(removal.kept.values()))}" if removal.kept else ""
        return {
            **unloaded,
            "message": f"the definition of {name} and {len(removal.removed)} files are deleted{kept}",
            "removed": removal.removed[:_SHOWN],
            "kept": dict(list(removal.kept.items())[:_SHOWN]),
            "bytes": removal.size,
        }


def _remove_row(work: Work) -> ModelDefinition | None:
    with committed("definitions.remove"):
        owned(*work.attempt)
        return store.remove(
            work.operation.element, id=UUID(work.operation.payload["definition"]), now=clock.now()
        )


def _imported_paths() -> set[str]:
    """Return the files of imports that are under way."""
    plans = Operation.objects.active().filter(kind=IMPORT).values_list("payload__plan__files", flat=True)
    return {file["path"] for files in plans for file in files or () if "path" in file}


@dataclass
class FileRemoval:
    """The outcome: paths in the models folder that were removed, and those that stay with the reason."""

    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    size: int = 0


async def _remove_files(models: Folder, row: ModelDefinition, imported: Collection[str]) -> FileRemoval:
    try:
        own = [parse_file(row.text.encode(), rows.SOURCE + row.name)]
    except UnusableDefinition:
        own = []  # saved by another version: only the imported files are known
    # After the row: whoever saves a definition now names files that are still there, or gets them again.
    others = await models.known()
    fetched = [file["path"] for file in row.files if isinstance(file.get("path"), str)]
    call = untrusted.in_daemon_thread(remove_files, models.path, own, fetched, others, imported)
    if not await untrusted.wait_until_done(call, timeout=FILES_WITHIN):
        raise Postpone("the models folder does not answer", seconds=30.0)
    return call.result()


def remove_files(
    models: Path,
    own: Iterable[Definition],
    fetched: Iterable[str],
    others: Iterable[Definition | UnusableDefinition],
    imported: Collection[str],
) -> FileRemoval:
    """Remove the files that these definitions name and no other one. Runs on a thread of its own."""
    removal, root = FileRemoval(), models.resolve()
    candidates = {Path(path) for definition in own for path, _ in sizes.files_of(models, definition)}
    candidates |= {path for text in fetched if (path := sizes.path_inside(models, text)) is not None}
    named: set[Path] = {path for text in imported if (path := sizes.path_inside(models, text)) is not None}
    broken = False
    for other in others:
        if isinstance(other, UnusableDefinition):
            broken = True
        else:
            named |= {part for path in _paths(models, other) for part in sizes.shards(path)}
    for path in sorted(candidates):
        relative = path.relative_to(models).as_posix()
        if broken:
            removal.kept[relative] = "a definition that cannot be used may name it"
        elif path in named or not named.isdisjoint(path.parents):
            removal.kept[relative] = "another definition names it"
        elif reason := _foreign(path, root):
            removal.kept[relative] = reason
        else:
            _remove_file(path, relative, removal)
    return removal


def _paths(models: Path, definition: Definition) -> Iterator[Path]:
    """Yield all paths that the definition may name; a value may be relative to the folder of its model."""
    beside = (Path(definition.model), Path(definition.model).parent)
    for _, text in named_texts(definition.options):
        for named in (text, *(f"{parent}/{text}" for parent in beside)):
            if (path := sizes.path_inside(models, named)) is not None:
                yield path


def _foreign(path: Path, root: Path) -> str:
    """Return the reason why the file is not ours to remove; "" if it is."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "it is no plain file"
        if not path.parent.resolve().is_relative_to(root) or status.st_dev != root.stat().st_dev:
            return "it lies on a share"
    return ""


def _remove_file(path: Path, relative: str, removal: FileRemoval) -> None:
    """Remove the file with its checksum files, then empty folders; a file that has gone is no error."""
    try:
        # An attempt that is repeated finds them by their file.
        for suffix in sizes.SIDES:
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            size = path.lstat().st_size
            path.unlink()
            removal.removed.append(relative)
            removal.size += size
        for parent in list(path.parents)[: len(Path(relative).parts) - 1]:
            with suppress(OSError):
                os.rmdir(parent)
    except OSError as error:
        removal.kept[relative] = f"it cannot be removed: {error.strerror}"
