"""The operation `model_import`: fetch the files of a plan into the models folder, then save its definition.

Under the policy `worker`, files that workers download themselves stay at their sources: only size, hash and
header are recorded (`files_at_source.py`). If a load needs such files on the control plane, an import without
a definition fetches them (`nodes/loading/source_downloads.py`).

The definition is saved in one transaction under the attempt's fence, after every file was fetched and
verified. A repeated attempt continues with the received bytes: complete files are only verified, and a saved
definition is not changed. A transient failure puts the operation back into the queue; without a new byte for
`GIVE_UP_AFTER` the operation fails. Its files count as used from its admission on, so they are not removed
meanwhile (`files_in_use.py`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from django.db import transaction

from localai_cluster.kit import backoff, clock, conf, errors
from localai_cluster.kit.outbound import SourceBusy, SourceError
from localai_cluster.kit.quantities import counted, human_bytes
from localai_cluster.kit.transactions import committed
from nodes.commands.commands import first_result
from nodes.definitions import rows, store
from nodes.definitions.files import Definition
from nodes.definitions.folder import FolderUnresponsive, folder
from nodes.definitions.recorded_files import FileConflict, FolderReplaced, RecordedFile, mark_folder
from nodes.downloads import files_at_source, partial_files
from nodes.downloads.downloader import Download, DownloadedFile, DownloadMeter
from nodes.loading import load_request
from nodes.loading.file_removal import return_files
from nodes.loading.files_in_use import IMPORT, FilesInUse, in_folder_thread, paths_of_active_imports
from nodes.loading.source_downloads import FILES_ONLY, WAITING
from nodes.loading.source_files import in_staging_thread
from nodes.models import ModelDefinition
from nodes.sources.opening import SourceOpener
from nodes.sources.plans import SHARE_PREFIX, ImportPlan, SourceFile, check_files, from_payload
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger.admission import (
    Admission,
    OperationRequest,
    Requester,
    admit,
    cancel,
    exclusion_error,
    lock_operation,
)
from operations.ledger.attempts import lock_owned, update_payload
from operations.ledger.progress import Tick
from operations.models import ACTIVE, Operation

KIND = IMPORT
PLAN = "plan"
"""Payload key: the import plan."""
LOAD = "load"
"""Payload key: True if the model is loaded after the import."""
REVISION = "revision"
"""Payload key: revision of the stored definition at the admission; 0 = no definition."""
STALLED_SINCE = "stalled_since"
"""Payload key for later attempts: time of the last progress, ISO 8601."""
REACHED = "reached"
"""Payload key for later attempts: greatest number of received bytes."""
FETCHED = "fetched"
"""Payload key for later attempts: address and hash of fetched files without a published hash, by path."""
SAVED = "saved"
"""Payload key for later attempts: id and revision of the saved definition."""
AT_ONCE = 4
"""Maximum parallel imports of one controller; each uses the configured number of connections."""
MAX_WAITING = 16
"""Maximum imports of one controller that wait for their turn; further ones return to the queue.

A controller runs a limited number of operations at once, and loads need capacity too.
"""
_TURN_RETRY_SECONDS = 30.0
REPORT_EVERY = 0.5
"""Seconds between two progress reports."""
FIRST_PAUSE, MAX_PAUSE = 30.0, 600.0
"""Seconds in the queue after a transient failure, doubled each time."""
STALL_TIMEOUT = 600.0
"""Seconds without progress after which the attempt ends, because the models folder may hang."""
GIVE_UP_AFTER = timedelta(hours=24)
"""Time without a new byte after which the import fails."""
_DOWNLOADED_PERCENT = 90.0
"""O26: progress in percent when all files are downloaded and verified."""
_SAVING_PERCENT = 99.0
"""O26: progress in percent while the definition is saved."""


def request_import(
    plan: ImportPlan, *, by: Requester, now: datetime, load_after_import: bool = False
) -> Admission:
    """Create the import, or join the active import of the same plan.

    Raises InvalidInput for a forbidden plan or a definition that could not be saved, and Conflict while
    another plan of the same name is active.
    """
    check_files(plan.files)
    store.check(plan.name, plan.text)  # before gigabytes are downloaded for it
    row = store.find(plan.name)
    revision = row.revision if row is not None else 0
    payload = {PLAN: plan.as_payload(), LOAD: load_after_import, REVISION: revision}
    request = OperationRequest(
        KIND,
        key=f"import:{plan.name}",
        element=plan.name,
        by=by,
        payload=payload,
    )
    admission = admit(request, now=now)
    if not admission.created:
        if _plan_of(admission.operation) != plan or FILES_ONLY in admission.operation.payload:
            raise exclusion_error(admission.operation)
        if load_after_import:
            _make_joined_import_load(admission.operation)
    return admission


def cancel_import(operation: Operation, actor: str, now: datetime) -> Operation:
    """Cancel the import. Raise Conflict if it has ended or has saved its definition."""
    with transaction.atomic():
        if SAVED in lock_operation(operation.id).payload and operation.status in ACTIVE:
            raise errors.Conflict(
                f"{operation.element} is defined already: delete the model instead", field="status"
            )
        return cancel(operation.id, actor=actor, now=now)


def _make_joined_import_load(joined: Operation) -> None:
    """Make the joined import load the model; request the load now if its definition is already saved."""
    with transaction.atomic():
        operation = lock_operation(joined.id)
        if SAVED in operation.payload:
            _request_load(operation)
        elif not operation.payload[LOAD]:
            operation.payload = {**operation.payload, LOAD: True}
            operation.save(update_fields=["payload"])


def _plan_of(operation: Operation) -> ImportPlan:
    return from_payload(operation.payload[PLAN])


@dataclass(frozen=True)
class _Import:
    """One attempt: its plan, and the progress of its files."""

    work: Work
    plan: ImportPlan
    files: Sequence[SourceFile]
    """Files that the attempt fetches."""
    meter: DownloadMeter
    left: Sequence[SourceFile] = ()
    """Files that stay at their sources."""

    @classmethod
    def of(cls, work: Work) -> "_Import":
        plan = _plan_of(work.operation)
        files = [file for file in plan.files if not file.url.startswith(SHARE_PREFIX)]
        return cls(work, plan, files, DownloadMeter({file.path: file.size for file in files}, plan.source))

    @property
    def is_files_only(self) -> bool:
        """True if the import saves no definition."""
        return bool(self.work.operation.payload.get(FILES_ONLY))

    async def without_files_at_source(self) -> "_Import":
        """Return the attempt without the files that stay at their sources. Raise FolderUnresponsive."""
        if self.is_files_only:
            return self
        left = await in_folder_thread(files_at_source.choose_files, self.plan, conf.cluster())
        files = [file for file in self.files if file not in left]
        self.meter.sizes = {file.path: file.size for file in files}
        return replace(self, files=files, left=left)

    def tick(self, progress_at: datetime | None = None) -> Tick:
        """Return the current progress."""
        return Tick("downloading", **self.meter.figures(_DOWNLOADED_PERCENT, progress_at))


class ImportModel:
    """Handler of the operation; one instance serves all operations of its controller."""

    def __init__(self, opener: SourceOpener) -> None:
        self._opener = opener
        self._turns, self._waiting = asyncio.Semaphore(AT_ONCE), 0

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the import. Raise Postpone for a transient failure, ClusterError for any other."""
        attempt = _Import.of(work)
        try:
            return await self._run(attempt)
        except SourceError as error:
            if error.permanent:
                raise
            raise await _postpone_or_fail(attempt, error) from error
        except (FolderUnresponsive, FolderReplaced) as error:
            raise await _postpone_or_fail(attempt, SourceError(error.message, can_retry=True)) from error

    async def _run(self, attempt: _Import) -> Mapping[str, Any]:
        work = attempt.work
        async with self._turn(work):
            is_marked = await _mark_folder()
            attempt = await attempt.without_files_at_source()
            fetched, left = await first_result(_report(attempt), self._fetch_all(attempt))
        size, name = sum(file.size for file in fetched), attempt.plan.name
        result = {"model": name, "files": len(fetched), "bytes": size}
        if attempt.is_files_only:
            message = f"files of {name} are here to be sent: {len(fetched)}, {human_bytes(size)}"
            return {"message": message, **result}
        await work.report(Tick("saving", f"saving {name}", percentage=_SAVING_PERCENT))
        files = [RecordedFile(entry.file.path, entry.file.url, entry.size, entry.sha256) for entry in fetched]
        records = [replace(file, is_marked=is_marked) for file in (*files, *left)]
        is_to_load = await in_thread(_save, work, attempt.plan, records)
        note = await _request_load_if_wanted(work, is_to_load=is_to_load)
        message = f"model {name} is here, {human_bytes(size)} in {counted(len(fetched), 'file')}{note}"
        if left:
            of_left = f"{human_bytes(sum(file.size for file in left))} in {counted(len(left), 'file')}"
            message = f"model {name} is defined; workers download {of_left}{note}"
        return {"message": message, **result}

    @contextlib.asynccontextmanager
    async def _turn(self, work: Work) -> AsyncIterator[None]:
        """Hold one of `AT_ONCE` turns. Raise Postpone if many other imports wait for one already."""
        must_wait, reason = (
            self._turns.locked(),
            f"waits for one of {AT_ONCE} other imports of this controller",
        )
        if must_wait and self._waiting >= MAX_WAITING:
            raise Postpone(reason, seconds=_TURN_RETRY_SECONDS, waiting=True)
        self._waiting += 1
        try:
            if must_wait:
                await work.report(Tick(WAITING, reason))
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    async def _fetch_all(self, attempt: _Import) -> tuple[list[DownloadedFile], list[RecordedFile]]:
        """Fetch the files in turn; a present file is only verified. Raise ClusterError.

        Return the fetched files, and the records of the files that stay at their sources.
        """
        cluster, name = conf.cluster(), attempt.plan.name
        models = cluster.models_path
        definitions = [one for one in await folder().all_contents() if isinstance(one, Definition)]
        own_definitions = [definition for definition in definitions if definition.name == name]
        other_definitions = [definition for definition in definitions if definition.name != name]
        files_at_source.check_conflicts(attempt.plan, models, other_definitions)
        own = await in_folder_thread(FilesInUse.of, models, own_definitions)
        others = await in_folder_thread(FilesInUse.of, models, other_definitions)
        active_paths = await in_thread(paths_of_active_imports)
        await return_files(models)
        await in_staging_thread(partial_files.remove_old_partials, models, clock.now(), active_paths)
        await in_staging_thread(_check_disk_space, models, attempt.files)
        left = await files_at_source.record_files(attempt.left, attempt.plan, self._opener, attempt.meter)
        fetched = []
        for file in [*attempt.files, *left.to_download]:
            download = Download(
                file,
                models,
                self._opener,
                attempt.meter,
                cluster.download_connections,
                _FetchedFiles(attempt.work),
            )
            # A new version of the model may replace the files of the former one, but of no other model.
            may_replace = own.has(file.path) and not others.has(file.path)
            fetched.append(await download.run(may_replace=may_replace))
        return fetched, left.recorded


async def _mark_folder() -> bool:
    """Mark the models folder; return False if that fails. Raise FolderReplaced and FolderUnresponsive."""
    definitions = [entry for entry in await folder().all_contents() if isinstance(entry, Definition)]
    files = [file for definition in definitions for file in definition.files.values()]
    return await in_folder_thread(mark_folder, conf.cluster().models_path, files)


def _check_disk_space(models: Path, files: Iterable[SourceFile]) -> None:
    """Raise DiskFull if the missing bytes do not fit on the disk."""
    present = partial_files.bytes_of_partials(models)
    missing = 0
    for file in files:
        try:
            is_here = (models / file.path).stat().st_size == file.size
        except (FileNotFoundError, NotADirectoryError):
            is_here = False
        # A file of another size is replaced, and stays until the new one is complete.
        missing += 0 if is_here else max(file.size - present.get(file.path, 0), 0)
    partial_files.check_free_space(models, missing)


@dataclass(frozen=True)
class _FetchedFiles:
    """The files without a published hash, of stored definitions and of all recorded imports."""

    work: Work

    async def hashes_of(self, file: SourceFile) -> set[str]:
        return await in_thread(_hashes_of, file)

    async def add(self, file: SourceFile, sha256: str) -> None:
        await in_thread(self._add, file, sha256)

    def _add(self, file: SourceFile, sha256: str) -> None:
        with transaction.atomic():
            fetched = lock_owned(*self.work.attempt).payload.get(FETCHED, {})
            entry = {"source": file.url, "sha256": sha256}
            update_payload(*self.work.attempt, {FETCHED: {**fetched, file.path: entry}})


def _hashes_of(file: SourceFile) -> set[str]:
    """Return the hashes of the file after fetches from this address to this path. Two queries."""
    place = {"path": file.path, "source": file.url}
    saved = ModelDefinition.objects.filter(files__contains=[place]).values_list("files", flat=True)
    entries = [entry for files in saved for entry in files if place.items() <= entry.items()]
    imports = Operation.objects.filter(kind=KIND, payload__fetched__has_key=file.path)
    for fetched in imports.values_list("payload__fetched", flat=True):
        if fetched[file.path]["source"] == file.url:
            entries.append(fetched[file.path])
    return {entry["sha256"] for entry in entries}


async def _report(attempt: _Import) -> NoReturn:
    """Report the progress; raise Postpone after `STALL_TIMEOUT` seconds without progress."""
    state, changed_at, moved_at = (-1, -1, ""), clock.monotonic(), clock.now()
    await attempt.work.report(attempt.tick())
    while True:
        await asyncio.sleep(REPORT_EVERY)
        meter = attempt.meter
        if (latest := (meter.moved, meter.current, meter.now)) != state:
            state, changed_at, moved_at = latest, clock.monotonic(), clock.now()
        elif clock.monotonic() - changed_at > STALL_TIMEOUT:
            reason = f"nothing has moved for {STALL_TIMEOUT:.0f} s ({meter.now}): does the folder answer?"
            raise await _postpone_or_fail(attempt, SourceError(reason, can_retry=True))
        attempt.work.progress(attempt.tick(moved_at))


async def _postpone_or_fail(attempt: _Import, error: SourceError) -> Postpone | SourceError:
    """Return a postponement, or the import's failure after `GIVE_UP_AFTER` without a new byte."""
    operation, now, reached = attempt.work.operation, clock.now(), attempt.meter.reached
    since, reached_before = operation.payload.get(STALLED_SINCE), operation.payload.get(REACHED, 0)
    stalled = datetime.fromisoformat(since) if since and reached <= reached_before else now
    if now - stalled >= GIVE_UP_AFTER:
        return SourceError(f"{error.message}; given up after 24 h without a new byte")
    entries = {STALLED_SINCE: stalled.isoformat(), REACHED: max(reached, reached_before)}
    await in_thread(update_payload, *attempt.work.attempt, entries)
    seconds = backoff.delay(operation.attempts + 1, first=FIRST_PAUSE, longest=MAX_PAUSE)
    if isinstance(error, SourceBusy):
        seconds = max(seconds, error.retry_after)
    until = stalled + GIVE_UP_AFTER
    reason = f"{error.message}; given up at {until:%Y-%m-%d %H:%M} UTC unless new bytes arrive"
    return Postpone(reason, seconds=seconds)


def _save(work: Work, plan: ImportPlan, files: Sequence[RecordedFile]) -> bool:
    """Save the definition once; return True if the model is to be loaded.

    A later attempt changes nothing, because the definition may have been deleted since. Raise Conflict if
    another user has changed the definition since the admission.
    """
    with committed("imports.save"):
        operation = lock_owned(*work.attempt)
        if SAVED not in operation.payload:
            row = _save_definition(operation, plan, files)
            update_payload(*work.attempt, {SAVED: {"definition": str(row.id), "revision": row.revision}})
        return bool(operation.payload[LOAD])


def _save_definition(
    operation: Operation, plan: ImportPlan, files: Sequence[RecordedFile]
) -> ModelDefinition:
    try:
        return store.save(
            plan.name,
            plan.text,
            origin=plan.origin,
            actor=operation.actor,
            reason=f"imported from {plan.source}",
            now=clock.now(),
            expected_revision=operation.payload[REVISION],
            files=[file.as_entry() for file in files],
        )
    except FileConflict:
        raise
    except errors.Conflict as conflict:
        row = store.find(plan.name)
        if row is None or row.text != plan.text:  # else somebody has saved the same
            raise errors.Conflict(
                f"{conflict.message}: it was changed meanwhile. The files are here; import it again."
            ) from conflict
        return row


async def _request_load_if_wanted(work: Work, *, is_to_load: bool) -> str:
    """Request a load if the import is to end with one; return a note for the operation's message."""
    definition = await folder().find(work.operation.element)
    if definition is None:
        return "; its definition is disabled or deleted"
    if not definition.source.startswith(rows.SOURCE_PREFIX):
        return f"; the file {definition.source} of the models folder is in force"
    if not is_to_load:
        return ""
    try:
        await in_thread(_request_load, work.operation)
    except errors.ClusterError as refusal:
        return f"; it is not loaded: {refusal.message}"
    return "; it is being loaded"


def _request_load(operation: Operation) -> None:
    requester = Requester(operation.actor, operation.request_id, operation.client_address)
    load_request.request_load(operation.element, requester)
