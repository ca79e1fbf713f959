"""The step of a load between backend and engine: send the model's files, unless nodes share the folder.

One load of a model at a time sends files to a node, so no file is written twice at once; other loads wait and
then find the files on the node. The operation stores the progress: bytes, files, rate. An attempt that ends
leaves the files that have arrived, and the next attempt continues from them (`transfer.py`).
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, Protocol

from localai_cluster.kit import clock, conf, errors
from nodes.commands.commands import unless
from nodes.definitions import sizes
from nodes.definitions.files import Definition
from nodes.definitions.folder import FolderUnresponsive
from nodes.loading.failures import LoadFailed, NodeRefused, WorkerGone
from nodes.loading.progress_deadline import ProgressDeadline
from nodes.loading.send_files import ModelTransfer, StagingResult, TransferLimits
from nodes.loading.source_files import FileChanged, in_staging_thread
from nodes.loading.staging_plan import MODEL_FILE, FilePlan, Unsendable, plan_files
from nodes.loading.transfer import FileRefused, Stalled, Unreachable
from nodes.loading.upload_meter import UploadMeter
from nodes.models import BackendNode
from nodes.placement import deadlines, memory
from nodes.placement.choose import describe_disk_need, format_gib
from nodes.registry import dial_targets, file_port
from nodes.registry.dial_targets import client_of
from nodes.replicas import slots, staged_files
from nodes.replicas.lifecycle import AttemptId
from nodes.replicas.slots import Slot
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger.progress import Tick

log = logging.getLogger(__name__)

PHASE = "staging"
REPORT_EVERY = 1.0
"""C48: seconds between two reports of bytes."""
_LOOK_AT_OTHER = 2.0
_LOOK_LIMIT = 10.0
_AFTER_CHANGE = 2.0
_REGISTERS = 10.0
"""Seconds in which a restarted worker registers."""
_SHARE = 90.0
"""Progress of a load whose files have arrived, in percent."""


class StagingAttempt(Protocol):
    """An attempt of a load with its reserved slot."""

    @property
    def work(self) -> Work:
        """The attempt's claimed operation."""

    @property
    def definition(self) -> Definition:
        """The definition of the model."""

    @property
    def slot(self) -> Slot:
        """The slot that the replica will use."""

    @property
    def id(self) -> AttemptId:
        """The owner of the replica's row."""

    def tick(self, phase: str, message: str, **figures: Any) -> Tick:
        """Return a progress report of the attempt."""


async def stage_files(
    attempt: StagingAttempt, options: Mapping[str, Any], lanes: TransferLimits
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the options for an engine on the node, and the part of the load's result about missing files.

    Raises NodeRefused, WorkerGone, LoadFailed and Postpone.
    """
    cluster, definition = conf.cluster(), attempt.definition
    if cluster.shared_models:
        return sizes.with_file_paths(cluster.models_path, definition.model, options), {}
    planned = await _planned(definition, options)
    sent = StagingResult("", {})
    if planned.files:
        await _wait_for_turn(attempt)
        sent = await _send_in_time(attempt, planned, lanes)
        if not await in_thread(slots.end_staging, attempt.slot, attempt=attempt.id):
            raise WorkerGone(f"the place on node {attempt.slot.node_name} was lost")
    engine_options, warnings = planned.told(sent.root, sent.failed)
    # Many engines download their models themselves, so a missing model file is no warning for operators.
    missing = [warning for warning in warnings if not warning.startswith(f"{MODEL_FILE} ")]
    for warning in warnings:
        level = logging.WARNING if warning in missing else logging.INFO
        log.log(level, "%s on %s goes without %s", definition.name, attempt.slot.node_name, warning)
    message = {"message": f"completed without {'; '.join(missing)}"} if missing else {}
    return engine_options, {"warnings": warnings, **message}


async def _planned(definition: Definition, options: Mapping[str, Any]) -> FilePlan:
    folder = conf.cluster().models_path
    try:
        async with asyncio.timeout(_LOOK_LIMIT):
            return await in_staging_thread(lambda: plan_files(folder, definition.name, options))
    except TimeoutError:
        hangs = FolderUnresponsive(f"the models folder {folder.name!r} of the control plane does not answer")
        raise Postpone(hangs.message, seconds=hangs.retry_after) from hangs
    except (Unsendable, OSError) as error:
        raise LoadFailed(f"staging: {error}") from error


async def _wait_for_turn(attempt: StagingAttempt) -> None:
    """Return when no other load sends files of the model to the node."""
    name, deadline = attempt.definition.name, ProgressDeadline(attempt.work)
    while not (has_begun := await in_thread(_begin, attempt)):
        if has_begun is None:
            raise WorkerGone(f"the place on node {attempt.slot.node_name} was lost")
        message = f"another load brings the files of {name} to {attempt.slot.node_name}"
        await attempt.work.report(attempt.tick(PHASE, message))
        await deadline.extend_for(deadlines.STALL)
        await asyncio.sleep(_LOOK_AT_OTHER)


def _begin(attempt: StagingAttempt) -> bool | None:
    return slots.begin_staging(attempt.slot, attempt=attempt.id)


async def _send_in_time(attempt: StagingAttempt, planned: FilePlan, lanes: TransferLimits) -> StagingResult:
    """Send all files within the longest time that a load may take (C31)."""
    age = (clock.now() - attempt.work.operation.created_at).total_seconds()
    limit = asyncio.timeout(max(deadlines.LONGEST_HOLD - age, 0))
    try:
        async with limit:
            return await _send(attempt, planned, lanes)
    except OSError as error:
        if not limit.expired():
            raise LoadFailed(f"staging: a file cannot be read ({error.strerror or error})") from error
        hours = deadlines.LONGEST_HOLD / 3600
        raise LoadFailed(
            f"staging: deadline exceeded, the files were not there after {hours:.0f} h"
        ) from None
    except (FileRefused, Stalled) as refusal:
        if isinstance(refusal, FileRefused) and refusal.of_token:
            # A restarted worker has another token. As soon as it registers, the slot is lost.
            await asyncio.sleep(_REGISTERS)
        raise NodeRefused(f"staging: {refusal}") from refusal
    except FileChanged as change:
        raise Postpone(f"staging: {change}; looking again", seconds=_AFTER_CHANGE) from change


async def _send(attempt: StagingAttempt, planned: FilePlan, lanes: TransferLimits) -> StagingResult:
    slot = attempt.slot
    try:
        server = await in_thread(dial_targets.http_server, slot.node_id)
    except errors.NotFound as gone:
        raise WorkerGone(gone.message) from gone
    except (dial_targets.NotReachable, dial_targets.AddressRefused, errors.Conflict) as refusal:
        raise NodeRefused(f"staging: {refusal.message}") from refusal
    meter = UploadMeter({file.relative: file.size for file in planned.files.values()}, slot.node_name)
    meter.waits(f"looking for the files of {attempt.definition.name} on {slot.node_name}")
    await attempt.work.report(_tick(attempt, meter))
    try:
        async with client_of(server) as client:
            sending = ModelTransfer(attempt.definition.name, planned, client, slot.node_id, lanes, meter)
            return await unless(_report_progress(attempt, meter), _send_missing(attempt, sending))
    except Unreachable as unreachable:
        # Not a refusal of the model: loads avoid the node until its port answers.
        problem = file_port.sentence(server.contact.address, str(unreachable))
        await in_thread(lambda: file_port.record_failure(slot.node_id, problem, now=clock.now()))
        raise WorkerGone(f"staging: {slot.node_name}: {problem}") from unreachable


async def _send_missing(attempt: StagingAttempt, sending: ModelTransfer) -> StagingResult:
    """Send the missing files. Record the bytes on the node also after a failure, for the next attempt."""
    missing, name = await sending.look(), attempt.definition.name
    try:
        await in_thread(_check_room, attempt.slot, missing)
        sent = await sending.run()
        attempt.work.progress(_tick(attempt, sending.meter))
        return sent
    finally:
        present_bytes = sending.meter.current
        await in_thread(
            lambda: staged_files.remember(attempt.slot.node_id, name, present_bytes, now=clock.now())
        )


def _check_room(slot: Slot, missing: int) -> None:
    """Refuse a node without disk space for the missing bytes; other loads may have used it (R2.38)."""
    node = BackendNode.objects.filter(pk=slot.node_id).first()
    needed = memory.required_disk(missing) if missing else 0
    if node is not None and node.total_disk > 0 and node.available_disk < needed:
        free = format_gib(node.available_disk)
        problem = f"{free} of disk space free, {describe_disk_need(missing, needed)} needed"
        if conf.cluster().disk_headroom_check:
            raise NodeRefused(f"staging: {problem}")
        log.warning("%s: %s", slot.node_name, problem)


async def _report_progress(attempt: StagingAttempt, meter: UploadMeter) -> NoReturn:
    """Report the progress each second, and keep the load needed while bytes move."""
    deadline, moved, moved_at = ProgressDeadline(attempt.work), meter.moved, clock.now()
    while True:
        await asyncio.sleep(REPORT_EVERY)
        if meter.moved != moved:
            moved, moved_at = meter.moved, clock.now()
        attempt.work.progress(_tick(attempt, meter, progress_at=moved_at))
        await deadline.extend_on_progress(meter.moved)


def _tick(attempt: StagingAttempt, meter: UploadMeter, *, progress_at: datetime | None = None) -> Tick:
    rate = meter.rate(clock.monotonic())
    total = meter.total
    return attempt.tick(
        PHASE,
        meter.sentence(rate),
        current_bytes=meter.current,
        total_bytes=total,
        percentage=_SHARE * meter.current / total if total else 0.0,
        file_index=meter.file_index,
        total_files=len(meter.sizes),
        bytes_per_second=rate,
        progress_at=progress_at,
    )
