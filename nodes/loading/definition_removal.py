"""The operation `definition_delete`: unload a model, delete its definition and, if requested, its files.

The operation locks the model as an unload of the whole cluster does, so no load begins before the definition
is deleted. The row is deleted under the attempt's fence after every replica has stopped; a repeated attempt
continues with the files. A file is deleted only if no other definition and no active import uses it
(`files_in_use.py`). Links, and files on a share or on another device than the models folder, are never
deleted. If a file of the models folder overrides the stored definition, the stored definition has no
replicas: only the row is deleted.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from localai_cluster.kit import clock, conf, errors, failpoints
from localai_cluster.kit.transactions import committed
from nodes.definitions import rows, sizes, store
from nodes.definitions.files import Definition, UnusableDefinition, parse_file
from nodes.definitions.folder import Folder, FolderUnresponsive, folder
from nodes.loading.file_removal import FileRemoval, remove_files
from nodes.loading.files_in_use import in_folder_thread
from nodes.models import ModelDefinition
from nodes.models.replica import ALL_REPLICAS_SUFFIX, load_key
from nodes.replicas import drains
from nodes.replicas.unload_requests import UnloadModel, record_unload
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger.admission import Admission, OperationRequest, Requester, admit
from operations.ledger.attempts import lock_owned
from operations.ledger.progress import Tick

KIND = drains.REMOVE_DEFINITION_KIND
_MAX_SHOWN_NAMES = 100


def request_removal(name: str, *, by: Requester, with_files: bool = False, now: datetime) -> Admission:
    """Create the operation that deletes the stored definition, or join the active one.

    Raises NotFound, and Conflict for a model that only a file defines, that is being loaded or unloaded, or
    that is being deleted without the files that this caller wants to delete.
    """
    row, file = store.find(name), store.file_of(name)
    if row is None:
        store.require_no_file(name)
        raise errors.NotFound(f"there is no stored definition of {name}")
    replicas = (
        drains.unloadable_replicas(name).order_by("node__name")
        if not file
        else drains.unloadable_replicas(name).none()
    )
    admission = admit(
        OperationRequest(
            KIND,
            key=f"definition:{name}" if file else load_key(name, ALL_REPLICAS_SUFFIX),
            element=name,
            by=by,
            payload={
                "model": name,
                "definition": str(row.id),
                "files": with_files,
                "grace": conf.cluster().unload_grace,
                "replica_index": None,
            },
            targets=list(replicas.values_list("node_id", "node__name").distinct()),
        ),
        now=now,
    )
    if with_files and not admission.operation.payload["files"]:
        raise errors.Conflict(
            f"{name} is being deleted without its files; delete them as unused files afterwards",
            field="files",
        )
    if admission.created and not file:
        because = f"deletion of its definition asked for by {by.actor}"
        record_unload(name, admission.operation.id, because=because, node_id=None, index=None, now=now)
    return admission


class RemoveDefinition(UnloadModel):
    """Handler of the operation: it stops the model's replicas, then deletes the definition."""

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the removal.

        Raise CommandFailed if a replica may still run, Postpone if the folder does not respond.
        """
        unloaded = await super().__call__(work) or {}
        name, payload = work.operation.element, work.operation.payload
        row = await in_thread(_remove_row, work)
        if not payload["files"] or row is None:
            return {**unloaded, "message": f"the definition of {name} is deleted"}
        await work.report(Tick("deleting", f"removing the files of {name}"))
        removal = await _remove_files(folder(), row, work)
        failpoints.passed("definitions.files")
        kept = f"; {len(removal.kept)} stay: {next(iter(removal.kept.values()))}" if removal.kept else ""
        return {
            **unloaded,
            "message": f"the definition of {name} and {len(removal.removed)} files are deleted{kept}",
            "removed": removal.removed[:_MAX_SHOWN_NAMES],
            "kept": dict(list(removal.kept.items())[:_MAX_SHOWN_NAMES]),
            "bytes": removal.size,
        }


def _remove_row(work: Work) -> ModelDefinition | None:
    with committed("definitions.remove"):
        lock_owned(*work.attempt)
        return store.remove(
            work.operation.element, id=UUID(work.operation.payload["definition"]), now=clock.now()
        )


async def _remove_files(models: Folder, row: ModelDefinition, work: Work) -> FileRemoval:
    """Delete the files that only this definition uses. Raise Postpone if the folder does not respond."""
    try:
        own = [parse_file(row.text.encode(), rows.SOURCE_PREFIX + row.name)]
    except UnusableDefinition:
        own = []  # saved by another version: only the imported files are known
    fetched = [file["path"] for file in row.files if isinstance(file.get("path"), str)]
    try:
        paths = await in_folder_thread(_own_paths, models.path, own, fetched)
        # After the row: whoever saves a definition now names files that are still there, or gets them again.
        return await remove_files(sorted(paths), work.attempt)
    except FolderUnresponsive as error:
        raise Postpone(error.message, seconds=30.0) from error


def _own_paths(models: Path, own: Iterable[Definition], fetched: Iterable[str]) -> set[str]:
    paths = {Path(path) for definition in own for path, _ in sizes.files_of(models, definition)}
    paths |= {path for text in fetched if (path := sizes.safe_join(models, text)) is not None}
    return {path.relative_to(models).as_posix() for path in paths}
