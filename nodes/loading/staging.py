"""The step of a load between backend and engine: send the model's files, unless nodes share the folder.

Only one load of a model at a time sends files to a node, so no file is written twice in parallel; other loads
wait and then find the files on the node. First the worker's state of all files is read, so a too small disk
is detected before the first byte. If the worker refuses a file of the model itself, the attempt ends; other
refused files are omitted from the engine's options, and the operator is warned (R2.57). A full disk and an
unreachable worker always end the attempt, because they affect all files. Files that have arrived stay, and
the next attempt continues from them (`transfer.py`). Files that are at their sources and not fetched by the
worker are first downloaded to the control plane (`source_downloads.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, ParamSpec, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

import httpx
from django.db import Error as DatabaseError
from django.db import IntegrityError

from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.quantities import format_gib
from nodes.commands.commands import first_result
from nodes.definitions import sizes
from nodes.definitions.files import Definition
from nodes.definitions.folder import FolderUnresponsive
from nodes.definitions.recorded_files import FileSource, FolderReplaced, files_at_source, sources_for_worker
from nodes.loading import source_downloads
from nodes.loading.load_attempts import Attempt, LoadFailed, NodeRefused, WorkerGone
from nodes.loading.load_request import ProgressDeadline
from nodes.loading.source_files import (
    MODEL_FILE,
    FileChanged,
    FilePlan,
    Unsendable,
    in_staging_thread,
    key_of,
    plan_files,
)
from nodes.loading.transfer import (
    ChangedAtSource,
    FileAtSource,
    FileRefused,
    Stalled,
    Transfer,
    Unreachable,
    UploadMeter,
    root_of,
)
from nodes.loading.worker_fetch import record_unreached, unreached_hosts
from nodes.models import BackendNode, BroughtModel
from nodes.placement import load_times, memory
from nodes.placement.sizes import describe_disk_need
from nodes.registry import dial_targets, file_port
from nodes.registry.dial_targets import client_of
from nodes.replicas import slots
from nodes.replicas.slots import InsufficientDisk, Slot
from operations.executor.work import Postpone, WakeUps, in_thread
from operations.ledger.progress import Tick

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

PHASE = source_downloads.PHASE
REPORT_EVERY = 1.0
"""Seconds between two progress reports while bytes are sent (C48)."""
STORE_EVERY = 10
"""Number of progress reports after which the bytes on the node are stored: about as often as workers report
their free disk space, so that bytes which have arrived do not count as used and as still to come."""
_TURN_POLL_SECONDS = 2.0
_PLAN_TIMEOUT = 10.0
_CHANGE_RETRY_SECONDS = 2.0
_REGISTRATION_SECONDS = 10.0
"""Seconds in which a restarted worker has registered again."""
_PROGRESS_AFTER_STAGING = 90.0
"""Percent of a load's progress at which all its files have arrived."""
MAX_TRANSFERS_PER_NODE = 4
"""Maximum files of one node that are looked for, fetched by its worker or sent in parallel."""
MAX_TRANSFERS = 16
"""Maximum files that one controller reads and sends in parallel."""


class TransferLimits:
    """The limits of one controller for parallel transfers."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(MAX_TRANSFERS)
        self._nodes: WeakValueDictionary[UUID, asyncio.Semaphore] = WeakValueDictionary()

    def to(self, node_id: UUID) -> asyncio.Semaphore:
        """Return the limit for this node, which exists as long as a transfer uses it."""
        return self._nodes.setdefault(node_id, asyncio.Semaphore(MAX_TRANSFERS_PER_NODE))


class FilesAtSource(Exception):
    """The worker has not fetched these files, so the control plane must download them."""

    def __init__(self, paths: list[str], sentences: list[str]) -> None:
        super().__init__(", ".join(paths))
        self.paths, self.sentences = paths, sentences
        """The paths, and a sentence for each file that the worker has tried to fetch."""


@dataclass(frozen=True)
class StagingResult:
    """The result of staging on one worker."""

    root: str
    """The worker's folder that relative options are resolved against; "" if no file had to be sent."""
    failed: dict[str, str]
    """By path: why the file is not on the worker."""
    sent_instead: list[str] = field(default_factory=list)
    """Sentences about the files that the control plane sent because the worker could not fetch them."""


@dataclass
class ModelTransfer:
    """The transfer of one model's files to one worker."""

    model: str
    plan: FilePlan
    client: httpx.AsyncClient
    node_id: UUID
    limits: TransferLimits
    meter: UploadMeter
    stall: float = load_times.STALL
    sources: Mapping[str, FileSource] = field(default_factory=dict)
    """By path: the source of each file that the worker fetches itself."""
    unreached: dict[str, datetime] = field(default_factory=dict)
    """By host of a source: the time when the node could not reach it."""
    on_fallback: Callable[[str], Awaitable[None]] | None = None
    """Called with a sentence when a file is sent that the worker could not fetch."""
    before_source: Callable[[], Awaitable[None]] | None = None
    """Called before the worker fetches a file that is only at its source; raises LoadFailed to prevent it."""

    @cached_property
    def _transfers(self) -> list[Transfer]:
        return [
            Transfer(
                self.client,
                file,
                key_of(self.model, file.relative),
                self.meter,
                self.stall,
                self.sources.get(file.relative),
                self.unreached,
            )
            for file in self.plan.files.values()
        ]

    async def check(self) -> int:
        """Ask the worker for the state of all files; return the number of missing bytes.

        Raises FileRefused, Stalled and Unreachable.
        """
        await self._run_for_each(Transfer.check)
        return self.meter.total - self.meter.current

    async def send(self) -> StagingResult:
        """Send all files. Raise FileRefused, ChangedAtSource, Stalled, Unreachable, FileChanged and OSError.

        If files at their sources were not fetched by the worker, raise FilesAtSource after all other files
        are sent.
        """
        roots: set[str] = set()
        failed: dict[str, str] = {}
        sent_instead: list[str] = []
        at_source: list[str] = []

        async def send(transfer: Transfer) -> None:
            file = transfer.file
            try:
                roots.add(root_of(await self._deliver(transfer, sent_instead), file.relative))
            except FileAtSource:
                at_source.append(file.relative)
            except FileRefused as refusal:
                if refusal.affects_node or self.plan.is_vital(file.relative):
                    raise
                failed[file.relative] = str(refusal)
                self.meter.finish_file(file.relative)
            except OSError as error:
                if self.plan.is_vital(file.relative):
                    raise
                failed[file.relative] = f"cannot be read: {error.strerror or error}"
                self.meter.finish_file(file.relative)

        await self._run_for_each(send)
        if at_source:
            raise FilesAtSource(sorted(at_source), sent_instead)
        if len(roots) > 1:
            raise FileRefused(self.model, 200, f"it keeps the files in several places: {sorted(roots)[:3]}")
        return StagingResult(next(iter(roots), ""), failed, sent_instead)

    async def _deliver(self, transfer: Transfer, sent_instead: list[str]) -> str:
        """Have the worker fetch the file or send it, unless the worker has it; return its path there."""
        if transfer.needs_source and self.before_source is not None:
            await self.before_source()
        path = await transfer.fetch()
        if transfer.fetch_problem:
            sent_instead.append(await self._report_fallback(transfer))
        if path := path or await transfer.find():
            return path
        async with self.limits.all:
            return await transfer.send()

    async def _report_fallback(self, transfer: Transfer) -> str:
        """Report a file that the worker could not fetch, and record a source that it could not reach."""
        if transfer.is_unreachable and transfer.source is not None:
            now, host = clock.now(), transfer.source.host
            self.unreached[host] = now
            await in_thread(record_unreached, self.node_id, host, now=now)
        name, problem = transfer.file.relative, transfer.fetch_problem
        sentence = f"{self.meter.node} did not download {name}, so it is sent: {problem}"
        if self.on_fallback is not None:
            await self.on_fallback(sentence)
        return sentence

    async def _run_for_each(self, step: Callable[[Transfer], Awaitable[None]]) -> None:
        """Run one step for each file, several files in parallel; the first failure cancels the rest."""
        pending = iter(self._transfers)

        async def run_steps() -> None:
            for transfer in pending:
                async with self.limits.to(self.node_id):
                    await step(transfer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MAX_TRANSFERS_PER_NODE, len(self._transfers))):
                    group.create_task(run_steps())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error


async def stage_files(
    attempt: Attempt, options: Mapping[str, Any], limits: TransferLimits, wake_ups: WakeUps
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Send the model's files to the node; return the engine's options, and result fields about missing files.

    Raises NodeRefused, WorkerGone, LoadFailed, Postpone and Abandoned.
    """
    cluster, definition = conf.cluster(), attempt.definition
    if cluster.shared_models:
        await _download_for_shared(attempt, options, wake_ups)
        return sizes.with_file_paths(cluster.models_path, definition.model, options), {}
    planned = await _plan_files(definition, options)
    sent = StagingResult("", {})
    if planned.files:
        await _wait_for_turn(attempt, sum(file.size for file in planned.files.values()))
        planned, sent = await _send_all(attempt, options, planned, limits, wake_ups)
        if not await in_thread(slots.end_staging, attempt.slot, attempt=attempt.work.attempt):
            raise WorkerGone(f"the place on node {attempt.slot.node_name} was lost")
    engine_options, warnings = planned.engine_options(sent.root, sent.failed)
    # Many engines download their models themselves, so a missing model file is no warning for operators.
    missing = [warning for warning in warnings if not warning.startswith(f"{MODEL_FILE} ")]
    for warning in warnings:
        level = logging.WARNING if warning in missing else logging.INFO
        log.log(level, "%s on %s: %s", definition.name, attempt.slot.node_name, warning)
    message = {"message": f"completed without {'; '.join(missing)}"} if missing else {}
    return engine_options, {"warnings": [*warnings, *sent.sent_instead], **message}


async def _download_for_shared(attempt: Attempt, options: Mapping[str, Any], wake_ups: WakeUps) -> None:
    """Download the files that are missing in a models folder that control plane and nodes share."""
    files = attempt.definition.files
    # Without a walk through the model's folder, as long as no file is missing.
    if files and await _read_in_thread(files_at_source, conf.cluster().models_path, files):
        needed = (await _plan_files(attempt.definition, options)).at_source
        if needed:
            await source_downloads.download(attempt, needed, wake_ups)


async def _send_all(
    attempt: Attempt, options: Mapping[str, Any], planned: FilePlan, limits: TransferLimits, wake_ups: WakeUps
) -> tuple[FilePlan, StagingResult]:
    """Send all files; the control plane first downloads those that the worker does not fetch.

    Return the plan and the result. While the control plane downloads, the worker may lose files: these are
    downloaded too.
    """
    downloaded: list[str] = []
    sentences: list[str] = []
    while True:
        try:
            sent = await _send_in_time(attempt, planned, limits, downloaded)
        except FilesAtSource as lack:
            await source_downloads.download(attempt, lack.paths, wake_ups)
            downloaded, sentences = [*downloaded, *lack.paths], [*sentences, *lack.sentences]
            planned = await _plan_files(attempt.definition, options)
        else:
            sent.sent_instead[:0] = sentences
            return planned, sent


async def _plan_files(definition: Definition, options: Mapping[str, Any]) -> FilePlan:
    folder = conf.cluster().models_path
    return await _read_in_thread(plan_files, folder, definition.name, options, definition.files)


async def _read_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Read the models folder in a thread. Raise LoadFailed, and Postpone if the folder does not respond."""
    try:
        async with asyncio.timeout(_PLAN_TIMEOUT):
            return await in_staging_thread(function, *args, **kwargs)
    except TimeoutError:
        name = conf.cluster().models_path.name
        hangs = FolderUnresponsive(f"the models folder {name!r} of the control plane does not answer")
        raise Postpone(hangs.message, seconds=hangs.retry_after) from hangs
    except FolderReplaced as replaced:
        raise Postpone(replaced.message, seconds=replaced.retry_after) from replaced
    except (Unsendable, OSError) as error:
        raise LoadFailed(f"staging: {error}") from error


async def _wait_for_turn(attempt: Attempt, files: int) -> None:
    """Wait until no other load sends files of the model to the node; check its quota for `files` bytes."""
    name, deadline = attempt.definition.name, ProgressDeadline(attempt.work)
    while True:
        try:
            has_begun = await in_thread(
                slots.begin_staging, attempt.slot, attempt=attempt.work.attempt, files=files
            )
        except InsufficientDisk as lack:
            raise NodeRefused(f"staging: {lack}") from lack
        if has_begun:
            return
        if has_begun is None:
            raise WorkerGone(f"the place on node {attempt.slot.node_name} was lost")
        message = f"another load brings the files of {name} to {attempt.slot.node_name}"
        await attempt.work.report(attempt.tick(PHASE, message))
        await deadline.extend_for(load_times.STALL)
        await asyncio.sleep(_TURN_POLL_SECONDS)


async def _send_in_time(
    attempt: Attempt, planned: FilePlan, limits: TransferLimits, downloaded: Collection[str] = ()
) -> StagingResult:
    """Send all files within the maximum age of a load (C31).

    Raise FilesAtSource, except for `downloaded` files: the control plane has these, and the worker does not
    fetch them again.
    """
    age = (clock.now() - attempt.work.operation.created_at).total_seconds()
    limit = asyncio.timeout(max(load_times.MAX_HOLD - age, 0))
    try:
        async with limit:
            return await _send(attempt, planned, limits, downloaded)
    except FilesAtSource as lack:
        if lost := next((path for path in lack.paths if path in downloaded), ""):
            raise Postpone(
                f"staging: {lost} was removed; looking again", seconds=_CHANGE_RETRY_SECONDS
            ) from lack
        raise
    except OSError as error:
        if not limit.expired():
            raise LoadFailed(f"staging: a file cannot be read ({error.strerror or error})") from error
        hours = load_times.MAX_HOLD / 3600
        raise LoadFailed(
            f"staging: deadline exceeded, the files were not there after {hours:.0f} h"
        ) from None
    except (FileRefused, Stalled) as refusal:
        if isinstance(refusal, FileRefused) and refusal.is_token_refusal:
            # A restarted worker has another token. As soon as it registers, the slot is lost.
            await asyncio.sleep(_REGISTRATION_SECONDS)
        raise NodeRefused(f"staging: {refusal}") from refusal
    except ChangedAtSource as change:
        raise source_downloads.LoadedFileChanged(str(change)) from change
    except FileChanged as change:
        raise Postpone(f"staging: {change}; looking again", seconds=_CHANGE_RETRY_SECONDS) from change


async def _send(
    attempt: Attempt, planned: FilePlan, limits: TransferLimits, downloaded: Collection[str]
) -> StagingResult:
    slot, definition = attempt.slot, attempt.definition
    try:
        server = await in_thread(dial_targets.http_server, slot.node_id)
    except errors.NotFound as gone:
        raise WorkerGone(gone.message) from gone
    except (dial_targets.NotReachable, dial_targets.AddressRefused, errors.Conflict) as refusal:
        raise NodeRefused(f"staging: {refusal.message}") from refusal
    meter = UploadMeter({file.relative: file.size for file in planned.files.values()}, slot.node_name)
    sources = sources_for_worker(definition.files, definition.download_on)
    sources = {path: file for path, file in sources.items() if path not in downloaded}
    unreached = await in_thread(unreached_hosts, slot.node_id, now=clock.now()) if sources else {}
    meter.now = f"looking for the files of {attempt.definition.name} on {slot.node_name}"
    await attempt.work.report(_tick(attempt, meter))
    try:
        async with client_of(server) as client:
            sending = ModelTransfer(
                attempt.definition.name,
                planned,
                client,
                slot.node_id,
                limits,
                meter,
                sources=sources,
                unreached=unreached,
                on_fallback=lambda sentence: _report_fallback(attempt, sentence),
                before_source=lambda: in_thread(
                    source_downloads.check_former_load, attempt.work.operation, definition
                ),
            )
            lock = asyncio.Lock()
            return await first_result(
                _report_progress(attempt, meter, lock), _send_missing(attempt, sending, lock)
            )
    except Unreachable as unreachable:
        # Not a refusal of the model: loads avoid the node until its port answers.
        problem = file_port.failure_text(server.contact.address, str(unreachable))
        await in_thread(file_port.record_failure, slot.node_id, problem, now=clock.now())
        raise WorkerGone(f"staging: {slot.node_name}: {problem}") from unreachable


async def _report_fallback(attempt: Attempt, sentence: str) -> None:
    log.warning("%s: %s", attempt.definition.name, sentence)
    await attempt.work.report(attempt.tick(PHASE, sentence))


async def _send_missing(attempt: Attempt, sending: ModelTransfer, lock: asyncio.Lock) -> StagingResult:
    """Send the missing files. Store the number of bytes on the node even after a failure."""
    async with lock:
        missing = await sending.check()
    try:
        await in_thread(_check_disk_space, attempt.slot, missing)
        sent = await sending.send()
        attempt.work.progress(_tick(attempt, sending.meter))
        return sent
    finally:
        await _store_current_bytes(attempt, sending.meter, lock)


async def _store_current_bytes(attempt: Attempt, meter: UploadMeter, lock: asyncio.Lock) -> None:
    """Store how many bytes are on the node. A cancellation of the caller does not cancel this.

    The lock is held until the thread has ended, so an earlier number never replaces a later one.
    """

    async def store() -> None:
        async with lock:
            name = attempt.definition.name
            await in_thread(store_staged_bytes, attempt.slot.node_id, name, meter.current, now=clock.now())

    await asyncio.shield(store())


def _check_disk_space(slot: Slot, missing: int) -> None:
    """Raise NodeRefused if the missing bytes do not fit; other loads may have used the disk (R2.38)."""
    if not missing:
        return
    node, needed = BackendNode.objects.filter(pk=slot.node_id).first(), memory.required_disk(missing)
    if node is not None and node.total_disk > 0 and node.available_disk < needed:
        free = format_gib(node.available_disk)
        problem = f"{free} of disk space free, {describe_disk_need(missing, needed)} needed"
        if conf.cluster().disk_headroom_check:
            raise NodeRefused(f"staging: {problem}")
        log.warning("%s: %s", slot.node_name, problem)


async def _report_progress(attempt: Attempt, meter: UploadMeter, lock: asyncio.Lock) -> NoReturn:
    """Report the progress each second, and extend the load's deadline while bytes are transferred."""
    deadline, moved, moved_at, reports = ProgressDeadline(attempt.work), meter.moved, clock.now(), 0
    while True:
        await asyncio.sleep(REPORT_EVERY)
        reports += 1
        # Not while files are looked for: those that were not found yet would count as missing.
        if reports % STORE_EVERY == 0 and not lock.locked():
            with suppress(DatabaseError):  # until the next time, or the end of the transfer
                await _store_current_bytes(attempt, meter, lock)
        if meter.moved != moved:
            moved, moved_at = meter.moved, clock.now()
        attempt.work.progress(_tick(attempt, meter, progress_at=moved_at))
        await deadline.extend_on_progress(meter.moved)


def _tick(attempt: Attempt, meter: UploadMeter, *, progress_at: datetime | None = None) -> Tick:
    return attempt.tick(PHASE, **meter.figures(_PROGRESS_AFTER_STAGING, progress_at))


def store_staged_bytes(node_id: UUID, model_name: str, size: int, *, now: datetime) -> None:
    """Store how many bytes of the model's files are on the node, so that later loads need less disk space.

    The deletion of the model on the node deletes the row. The row may be outdated after a controller was
    killed or the worker's disk was cleared; the check of the next load corrects it.
    """
    row = BroughtModel(node_id=node_id, model_name=model_name, size=size, seen_at=now)
    with suppress(IntegrityError):  # the node has been removed
        BroughtModel.objects.bulk_create(
            [row],
            update_conflicts=True,
            unique_fields=["model_name", "node"],
            update_fields=["size", "seen_at"],
        )
