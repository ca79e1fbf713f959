"""The operation `model_load`: from "no node serves this model" to one serving replica.

Steps: end the rows of ended attempts, place the load on a node whose worker answers, install the backend if
the worker lacks it (an operation of its own, which other loads may join), send the model's files
(`staging.py`), start the process, call `LoadModel`, publish the row. Then the load ends; the memory of the
engine is measured in the background (`load_info.py`). The process may die after any step: the row names the
attempt that owns it, and each attempt has its own row and slot. An attempt lives as long as it owns its row;
it loses the row when the node departs. If an attempt publishes no replica, its engine is stopped, and the row
stays until a controller has confirmed the end of the engine. The stored definition alone determines the model
and its options; the slot determines the node.

Load options are tuned to the node, unless tuning is disabled (R2.80), and are not part of the revision: the
same definition may load with other values on another node. On a node that reports its GPUs an engine sees
only the GPUs that its slot has reserved.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, assert_never
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster.kit import clock, conf, errors, names
from localai_cluster.kit.quantities import format_gib
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import InstallReply
from localai_cluster.rpc.client import BackendClient, options_from_mapping
from localai_cluster.rpc.errors import BackendError, Busy, Cancelled, DeadlineExceeded, Lost, Refused
from nodes.backends import admission, backend_requests, node_commands
from nodes.commands.commands import first_result
from nodes.commands.outcomes import BusDown, Done, NoResponders, StillRunning, Unreadable
from nodes.commands.outcomes import Refused as WorkerRefused
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.loading import load_attempts, load_info, load_placement, staging
from nodes.loading.load_attempts import Attempt, Cause, LoadFailed, NodeRefused, WorkerGone
from nodes.loading.load_placement import wait_until_evicted
from nodes.loading.load_request import request_of
from nodes.loading.staging import TransferLimits
from nodes.models import BackendNode
from nodes.placement.load_times import MARGIN, load_limit
from nodes.registry import dial_targets
from nodes.replicas import engines, fleet_queries, slots
from nodes.replicas.slots import Slot
from operations.executor.work import Postpone, WakeUps, Work, in_thread
from operations.ledger.admission import Requester
from operations.models import TERMINAL, Operation, Status

log = logging.getLogger(__name__)

_INSTALL_POLL_SECONDS = 2.0
_SLOT_POLL_SECONDS = 2.0
_WAITS_FOR_OTHER_REPLICA_REASON = "waits for another replica of the model that is being loaded"
_PROGRESS_INSTALLED = 0.9
"""Progress (0 to 1) of a load whose backend is installed and that has no files to send."""
_PROGRESS_INSTALLED_BEFORE_FILES = 0.45
"""Progress (0 to 1) of a load whose backend is installed and that may have files to send."""


class LoadModel:
    """Handler of the operation; one instance serves all loads of its controller."""

    def __init__(self, bus: Bus, definitions: Folder, wake_ups: WakeUps) -> None:
        self._bus, self._definitions, self._wake_ups = bus, definitions, wake_ups
        self._transfer_limits = TransferLimits()
        self._learning: set[asyncio.Task[None]] = set()
        """Running measurements of serving engines; the end of the event loop cancels them."""

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the load. Raise Postpone with the reason while the load must wait."""
        await in_thread(slots.end_abandoned_loads, work.operation.element, now=clock.now())
        try:
            definition = await load_info.find_definition(self._definitions, work.operation.element)
        except FolderUnresponsive as hangs:
            raise Postpone(hangs.message, seconds=hangs.retry_after) from hangs
        if definition is None:
            raise await in_thread(load_attempts.record_undefined, work.id)
        request = request_of(work.operation)
        if request.is_scale_up and work.operation.result:
            return dict(work.operation.result)  # an attempt before has published its replica
        name, excluded = definition.name, request.excluded_nodes
        if not request.is_scale_up and await in_thread(
            fleet_queries.is_served, name, excluded_nodes=excluded
        ):
            return {"already_loaded": True}
        if not request.is_scale_up and await in_thread(
            fleet_queries.is_being_loaded, name, excluded_nodes=excluded
        ):
            # R2.64: no replica too many.
            raise await in_thread(
                load_attempts.record_without_slot,
                work.id,
                Cause.ON_ITS_WAY,
                _WAITS_FOR_OTHER_REPLICA_REASON,
                seconds=_SLOT_POLL_SECONDS,
            )
        replaced = request.replaces
        if (
            replaced is not None
            and await in_thread(fleet_queries.loaded_revision, replaced) == definition.revision
        ):
            return {"already_loaded": True}  # changed back, or requested by a controller with other files
        attempt = await self._place(work, definition)
        try:
            address, options, without = await first_result(_wait_until_slot_lost(attempt), self._run(attempt))
            # After the watch of the slot: the attempt does not own a published row any more.
            result = await _publish(attempt, address, options, without)
        except Exception as error:
            await _give_up(attempt)
            outcome = await in_thread(load_attempts.after_error, attempt, error)
            if outcome is error:
                raise
            raise outcome from error
        learning = asyncio.create_task(load_info.learn(attempt), name=f"memory of {attempt.process_key}")
        self._learning.add(learning)
        learning.add_done_callback(self._learning.discard)
        return result

    async def _place(self, work: Work, definition: Definition) -> Attempt:
        """Reserve a slot for the definition's model. Tests override this method."""
        wanted = await load_placement.read_needs(self._definitions, definition)
        return await load_placement.reserve_slot(self._bus, work, wanted)

    async def _run(self, attempt: Attempt) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
        """Load the model; return the engine's address, its options, and result fields on missing files."""
        await self._ensure_backend(attempt)
        slot = attempt.slot
        options = {**(slot.tuned_options or attempt.definition.options), **slot.options}
        located, without = await staging.stage_files(attempt, options, self._transfer_limits, self._wake_ups)
        if attempt.eviction is not None:
            await wait_until_evicted(attempt, attempt.eviction)
        engine = await self._start_engine(attempt)
        await self._load(attempt, engine, located)
        return engine.address, options, without

    async def _ensure_backend(self, attempt: Attempt) -> None:
        """Install the backend if the worker does not list it, and wait until it is installed."""
        backend = attempt.definition.backend
        await attempt.report("installing", f"looking for {backend} on {attempt.slot.node_name}")
        listing = attempt.listed or await _list_backends(attempt)
        if any(entry.name.lower() == backend.lower() for entry in listing.backends):
            return
        try:
            child = await in_thread(_admit_installation, attempt)
        except errors.Conflict as busy:
            # It is being upgraded or deleted there: another node may be ready sooner.
            raise WorkerGone(busy.message) from busy
        state = await self._follow_install(attempt, child)
        if state.status == Status.FAILED:
            raise NodeRefused(f"installing {backend} failed: {state.error}")
        if state.status == Status.CANCELLED:
            raise Postpone(f"the installation of {backend} was cancelled", seconds=1.0)

    async def _follow_install(self, attempt: Attempt, child: UUID) -> Operation:
        """Show the installation's progress as the load's until the installation has ended; return its row.

        Raises WorkerGone if the installation must wait for its worker: it continues without the load, and the
        load tries another node.
        """
        message = f"installing {attempt.definition.backend} on {attempt.slot.node_name}"
        fraction = _PROGRESS_INSTALLED_BEFORE_FILES if attempt.payload else _PROGRESS_INSTALLED
        before = (await in_thread(Operation.objects.get, pk=child)).attempts
        with self._wake_ups.watch(child) as watch:
            while (state := await in_thread(Operation.objects.get, pk=child)).status not in TERMINAL:
                if state.status == Status.WAITING or state.attempts > before:
                    raise WorkerGone(state.message)
                if state.total_bytes or state.time_limit_at is not None:
                    figures = attempt.tick(
                        "installing",
                        message,
                        current_bytes=state.current_bytes,
                        total_bytes=state.total_bytes,
                        percentage=state.progress * fraction,
                        progress_at=state.last_progress_at,
                        time_limit_at=state.time_limit_at,
                    )
                    attempt.work.progress(figures)
                    await attempt.deadline.extend_on_progress(state.current_bytes)
                await watch.changed(timeout=_INSTALL_POLL_SECONDS)
        return state

    async def _start_engine(self, attempt: Attempt) -> dial_targets.Contact:
        starting = f"starting {attempt.definition.backend} on {attempt.slot.node_name}"
        await attempt.report("loading", starting, time_limit=conf.cluster().install_timeout)
        node = await in_thread(BackendNode.objects.filter(pk=attempt.slot.node_id).first)
        if node is None:
            raise WorkerGone(f"node {attempt.slot.node_name} is no longer registered")
        offered = node_commands.offered_to(node)
        request = messages.InstallRequest(
            backend=attempt.definition.backend,
            model_id=attempt.definition.name,
            backend_galleries=offered.encoded,
            replica_index=attempt.slot.replica_index,
            op_id=str(attempt.work.id),
            gpus=reserved_gpus(attempt.slot),
        )
        reply = await _start_process(attempt, request, offered)
        # Also if it is refused below: its slot is free as soon as the engine has ended.
        await in_thread(slots.record_answer, attempt.slot)
        if not reply.address:
            raise NodeRefused(f"its worker reported no address for {attempt.process_key}")
        try:
            engine = await in_thread(
                dial_targets.accept_replied_address, attempt.slot.node_id, reply.address, now=clock.now()
            )
        except dial_targets.AddressRefused as refused:
            raise NodeRefused(refused.message) from refused
        await in_thread(slots.record_answer, attempt.slot, engine.address)
        check_gpus(reply, attempt.slot)
        # Before it loads: a request for a former engine of this address would reach the new one.
        if retired := await in_thread(
            engines.end_at_address,
            engine.address,
            node_id=attempt.slot.node_id,
            new_engine_id=attempt.slot.id,
        ):
            log.info("%s on %s took the address of %s", attempt.process_key, node.name, ", ".join(retired))
        return engine

    async def _load(self, attempt: Attempt, engine: dial_targets.Contact, options: Mapping[str, Any]) -> None:
        limit = load_limit(attempt.payload, conf.cluster().model_load_timeout)
        await attempt.deadline.extend_for(limit + MARGIN)
        loading = f"loading {attempt.definition.name} on {attempt.slot.node_name}"
        await attempt.report("loading", loading, time_limit=limit)
        client = BackendClient(engine.address, engine.token)
        try:
            engine_options = options_from_mapping(with_gpu_split(options, attempt.slot))
            result = await client.load_model(engine_options, timeout=limit)
        except DeadlineExceeded as error:
            raise LoadFailed(
                f"loading {format_gib(attempt.payload)} took longer than {limit:.0f} s"
                " (LOCALAI_NATS_MODEL_LOAD_TIMEOUT); the engine is stopped"
            ) from error
        except Cancelled as error:
            # A stopping engine cancels its calls: its worker has ended, or somebody has stopped it.
            raise Lost("the engine was stopped while it loaded the model") from error
        except (Refused, Lost, Busy):
            raise
        except BackendError as error:
            raise NodeRefused(f"{attempt.definition.backend} refused to load: {error.message}") from error
        finally:
            with contextlib.suppress(BackendError):
                await client.close()
        if not result.success:
            raise NodeRefused(
                f"{attempt.definition.backend} refused to load:"
                f" {names.to_readable_text(result.message) or 'no reason given'}"
            )


async def _publish(
    attempt: Attempt, address: str, options: Mapping[str, Any], without: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Turn the slot into a serving replica; return the load's result. Raise Postpone if the slot was lost."""
    result = {
        "node": attempt.slot.node_name,
        "address": address,
        "replica_index": attempt.slot.replica_index,
        "why": attempt.why,
        **without,
    }
    now = clock.now()
    published = await in_thread(
        slots.publish,
        attempt.slot,
        attempt=attempt.work.attempt,
        address=address,
        backend=attempt.definition.backend,
        options=dict(attempt.definition.options),
        options_hash=fingerprint(options),
        revision=attempt.definition.revision,
        now=now,
        replaces=request_of(attempt.work.operation).replaces,
        remembered=load_info.columns_of(attempt.definition),
        result=result,
    )
    if not published:
        raise Postpone(f"node {attempt.slot.node_name} restarted in the meantime", seconds=0.5)
    return result


async def _list_backends(attempt: Attempt) -> messages.ListReply:
    """Return the worker's backends. Raise WorkerGone if the worker does not answer properly."""
    while True:
        answer = await attempt.worker.contact()
        match answer:
            case Done(listed):
                return listed
            case WorkerRefused(reason) | NoResponders(reason) | StillRunning(reason) | Unreadable(reason):
                raise WorkerGone(reason)
            case BusDown(reason):
                await _keep_waiting(attempt, reason)
            case _:
                assert_never(answer)


async def _start_process(
    attempt: Attempt, request: messages.InstallRequest, offered: node_commands.GalleryOffer
) -> messages.InstallReply:
    """Start the engine, and wait for the reply while the worker is connected and the load is needed."""
    backend = attempt.definition.backend
    while True:
        # Before each send: until the last one is answered, it may still reach the worker.
        if not await in_thread(slots.start, attempt.slot, attempt=attempt.work.attempt, now=clock.now()):
            raise WorkerGone(f"the place on node {attempt.slot.node_name} was lost")
        outcome = await attempt.worker.install(request, timeout=conf.cluster().install_timeout)
        match outcome:
            case Done(reply):
                return reply
            case WorkerRefused(reason, reply) if reply.interrupted:
                raise Postpone(f"{attempt.process_key}: {reason}", seconds=1.0)
            case WorkerRefused(reason):
                await in_thread(slots.record_answer, attempt.slot)
                raise NodeRefused(f"{backend}: {offered.explained(reason)}")
            case Unreadable(reason):
                raise NodeRefused(f"{backend}: {reason}")
            case NoResponders(reason):
                raise WorkerGone(reason)
            case StillRunning(reason) | BusDown(reason):
                await _keep_waiting(attempt, reason)
            case _:
                assert_never(outcome)


async def _keep_waiting(attempt: Attempt, reason: str) -> None:
    """Report why the load waits. Raise Abandoned if the load's deadline has passed."""
    if end := load_attempts.end_if_not_needed(
        await in_thread(Operation.objects.get, pk=attempt.work.id), reason
    ):
        raise end
    await attempt.report("loading", f"{reason}; asking again")


async def _give_up(attempt: Attempt) -> None:
    # The controllers stop the engine: a stop from here could arrive when another engine has the process key.
    await in_thread(slots.end_attempt, attempt.slot, attempt=attempt.work.attempt, now=clock.now())


def _admit_installation(attempt: Attempt) -> UUID:
    node = BackendNode.objects.filter(pk=attempt.slot.node_id).first()
    if node is None:
        raise WorkerGone(f"node {attempt.slot.node_name} is no longer registered")
    operation = attempt.work.operation
    context = backend_requests.RequestScope(
        [node], by=Requester(operation.actor, operation.request_id), parent=operation
    )
    request = backend_requests.BackendRequest(backend_requests.INSTALL, attempt.definition.backend)
    return admission.admit(request, context, now=clock.now()).operation.id


async def _wait_until_slot_lost(attempt: Attempt) -> NoReturn:
    """Wait until the attempt has lost its slot, then raise WorkerGone."""
    while True:
        await asyncio.sleep(_SLOT_POLL_SECONDS)
        with contextlib.suppress(DatabaseError):
            if not await in_thread(slots.is_owned, attempt.slot, attempt=attempt.work.attempt):
                raise WorkerGone(f"node {attempt.slot.node_name} disconnected or restarted")


def fingerprint(options: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of an engine's load options."""
    content = json.dumps(options, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


_MIB = 2**20


def reserved_gpus(slot: Slot) -> tuple[str, ...]:
    """Return the ids of the GPUs that the slot has reserved; () means that the engine may see all GPUs."""
    return tuple(gpu.id for gpu in slot.gpus)


def check_gpus(reply: InstallReply, slot: Slot) -> None:
    """Raise NodeRefused if the engine reports other GPUs than its slot has reserved."""
    if slot.gpus and reply.gpus != reserved_gpus(slot):
        raise NodeRefused(f"its worker did not start it on the GPUs chosen there ({len(slot.gpus)})")


def with_gpu_split(options: Mapping[str, Any], slot: Slot) -> Mapping[str, Any]:
    """Return the options of `LoadModel` with the shares of an engine that is split over several GPUs.

    Without given shares the engine would split by the currently free memory, which may be reserved for
    another load.
    """
    if len(slot.gpus) < 2:
        return options
    return {**options, "TensorSplit": ",".join(str(max(gpu.amount // _MIB, 1)) for gpu in slot.gpus)}
