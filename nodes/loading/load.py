"""The operation `model_load`: from "no node serves this model" to one replica that does.

Steps: end the rows that ended attempts have left, place on a node whose worker answers, bring the backend if
the worker lacks it (an operation of its own, which others may join) and the model's files (`delivery.py`),
have the process started, `LoadModel`, publish the row. Each step may be the last one of this process: the row
names the attempt that owns it, and each attempt has a row and a slot of its own. An attempt lives as long as
it owns its row, which departs with the node. One that publishes no replica has its engine stopped, and the
row stays until a controller has seen that it is gone. What is loaded depends on the stored definition only,
where on the slot.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, assert_never
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster import clock, conf, errors, names
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendError, Busy, DeadlineExceeded, Lost, Refused
from localai_cluster.rpc.messages import options_from_mapping
from nodes.backends import admission, install, wishes
from nodes.backends.commands import Worker, unless
from nodes.backends.outcomes import BusDown, Done, NoResponders, StillRunning, Unreadable
from nodes.backends.outcomes import Refused as WorkerRefused
from nodes.definitions.files import Definition, load_options, revision
from nodes.definitions.folder import Folder, FolderHangs
from nodes.loading import attempts, delivery, needs, node_options, pinning, placing
from nodes.loading.failures import Cause, LoadFailed, NodeRefused, WorkerGone
from nodes.loading.hold import MovingWish
from nodes.loading.retrying import again, elsewhere
from nodes.loading.room import Room, made
from nodes.loading.wish import wish_of
from nodes.models import BackendNode
from nodes.placement.choose import gib
from nodes.placement.deadlines import MARGIN, load_limit
from nodes.placement.setbacks import Setbacks
from nodes.placement.tuning import fingerprint
from nodes.registry import dialling
from nodes.replicas import load_ends, retire, slots, snapshot
from nodes.replicas.lifecycle import AttemptId
from nodes.replicas.slots import Slot
from nodes.staging.send import Lanes
from operations.executor.waiting import Hints
from operations.executor.work import Abandoned, Postpone, Work, in_thread
from operations.ledger.progress import Tick
from operations.models import SHARE, TERMINAL, Operation, Status

log = logging.getLogger(__name__)

KIND = "model_load"
ALL = "all"
"""The share of what is about every replica of a model."""
_LOOK_AT_CHILD = 2.0
_LOOK_AT_SLOT = 2.0
_ON_ITS_WAY = "waits for another replica of the model that is being loaded"
_SHARE_OF_INSTALL, _AND_FILES = 0.9, 0.45
"""How far a load is when its backend has been brought; the second if the model's files may follow."""


def key(model_name: str, share: str = "0") -> str:
    """What a load owns. The share 0 is that of the load which requests join; `another.py` takes others."""
    return f"model:{model_name}{SHARE}{share}"


@dataclass(frozen=True)
class Attempt:
    """One claimed attempt at one place."""

    work: Work
    definition: Definition
    slot: Slot
    worker: Worker
    setbacks: Setbacks
    """The nodes that failed this load before, or did not answer."""
    why: str
    """What decided for this place."""
    hold: MovingWish
    payload: int = 0
    """Bytes of the model's files; 0 = not known."""
    room: Room | None = None
    """What has to leave before the place can be used."""
    listed: messages.ListReply | None = None
    """The worker's backends, if it has listed them since the place was free."""

    @property
    def id(self) -> AttemptId:
        """The owner of the attempt's row."""
        return attempt_id(self.work)

    @property
    def process_key(self) -> str:
        """The engine process on the worker."""
        return messages.process_key(self.definition.name, self.slot.replica_index)

    def tick(self, phase: str, message: str, **figures: Any) -> Tick:
        """Where the load stands."""
        return Tick(phase, message, node_id=self.slot.node_id, node_name=self.slot.node_name, **figures)

    async def report(self, phase: str, message: str, *, time_limit: float | None = None) -> None:
        """Says what comes next, and in how many seconds it is over; raises LeaseLost when it must not."""
        limit_at = None if time_limit is None else clock.now() + timedelta(seconds=time_limit)
        await self.work.report(self.tick(phase, message, time_limit_at=limit_at))


def attempt_id(work: Work) -> AttemptId:
    """Return operation and fence: unique for each attempt."""
    return AttemptId(work.id, work.operation.fence)


class LoadModel:
    """Handler; one instance serves all loads of its controller."""

    def __init__(self, bus: Bus, definitions: Folder, hints: Hints) -> None:
        self._bus, self._definitions, self._hints = bus, definitions, hints
        self._lanes = Lanes()

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Carries the load out, or says what it waits for."""
        await in_thread(load_ends.end_abandoned, work.operation.element, now=clock.now())
        try:
            definition = await self._definitions.find(work.operation.element)
        except FolderHangs as hangs:
            raise Postpone(hangs.message, seconds=hangs.retry_after) from hangs
        if definition is None:
            missing = errors.NotFound(f"model {work.operation.element} is not defined")
            raise await attempts.kept(work, Cause.UNDEFINED, missing)
        wish = wish_of(work.operation)
        if not wish.another and await in_thread(snapshot.serving, definition.name, besides=wish.besides):
            return {"already_loaded": True}
        if not wish.another and await in_thread(snapshot.on_its_way, definition.name, besides=wish.besides):
            # R2.64: not one replica too many.
            operation = await in_thread(Operation.objects.get, pk=work.id)
            follows = placing.later(operation, _ON_ITS_WAY, seconds=_LOOK_AT_SLOT)
            raise await attempts.kept(work, Cause.ON_ITS_WAY, follows)
        if wish.replaces and await in_thread(snapshot.loaded_by, wish.replaces) == revision(definition):
            return {"already_loaded": True}  # edited back, or somebody else's files
        attempt = await self._place(work, definition)
        try:
            return await unless(_slot_lost(attempt), self._carry_out(attempt))
        except (WorkerGone, Lost, Refused, Busy) as gone:
            await _give_up(attempt)
            # Read again: requests that came while the attempt ran have moved the wish.
            follows = again(attempt, await in_thread(Operation.objects.get, pk=work.id), gone)
            cause = Cause.WORKER_GONE if isinstance(gone, WorkerGone) else Cause.ENGINE_DIED
            raise await attempts.kept(work, cause, follows, attempt.slot) from gone
        except NodeRefused as refusal:
            await _give_up(attempt)
            follows = elsewhere(attempt, await in_thread(Operation.objects.get, pk=work.id), refusal)
            raise await attempts.kept(work, Cause.NODE_REFUSED, follows, attempt.slot) from refusal
        except (LoadFailed, Abandoned, Postpone) as end:
            await _give_up(attempt)
            cause = Cause.FAILED if isinstance(end, LoadFailed) else Cause.INTERRUPTED
            await attempts.kept(work, cause, end, attempt.slot)
            raise
        except Exception:
            await _give_up(attempt)
            raise

    async def _place(self, work: Work, definition: Definition) -> Attempt:
        files = await self._definitions.sizes.of(definition)
        need = needs.of(definition, files)
        what = placing.Wanted(definition, need, await self._definitions.conflicting(definition))
        place = await placing.place(self._bus, work, what, attempt=attempt_id(work))
        listed = place.listed
        worker = Worker(
            self._bus,
            str(place.slot.node_id),
            place.slot.node_name,
            listed.instance if listed is not None else "",
            answered=listed is not None,
        )
        return Attempt(
            work,
            definition,
            place.slot,
            worker,
            place.setbacks,
            place.why,
            MovingWish(work),
            files.payload,
            place.room,
            listed,
        )

    async def _carry_out(self, attempt: Attempt) -> Mapping[str, Any]:
        if attempt.room is not None:
            await made(attempt.room, attempt.work, attempt.slot)
        await self._bring_backend(attempt)
        options = await in_thread(node_options.of, attempt.definition, attempt.slot.node_id)
        located, without = await delivery.delivered(attempt, options, self._lanes)
        engine = await self._start_engine(attempt)
        await self._load(attempt, engine, located)
        published = await in_thread(
            slots.publish,
            attempt.slot,
            attempt=attempt.id,
            address=engine.address,
            backend=attempt.definition.backend,
            options=load_options(attempt.definition),
            told=fingerprint(options),
            revision=revision(attempt.definition),
            now=clock.now(),
            replaces=wish_of(attempt.work.operation).replaces,
        )
        if not published:
            raise Postpone(f"node {attempt.slot.node_name} restarted in the meantime", seconds=0.5)
        return {
            "node": attempt.slot.node_name,
            "address": engine.address,
            "replica_index": attempt.slot.replica_index,
            "why": attempt.why,
            **without,
        }

    async def _bring_backend(self, attempt: Attempt) -> None:
        """Has the backend installed when the worker does not list it, and waits for that operation."""
        backend = attempt.definition.backend
        await attempt.report("installing", f"looking for {backend} on {attempt.slot.node_name}")
        listed = attempt.listed or await _listed(attempt)
        if any(entry.name.lower() == backend.lower() for entry in listed.backends):
            return
        try:
            child = await in_thread(_admit_install, attempt)
        except errors.Conflict as busy:
            # It is being upgraded or deleted there: another node may be ready sooner.
            raise WorkerGone(busy.message) from busy
        state = await self._follow_install(attempt, child)
        if state.status == Status.FAILED:
            raise NodeRefused(f"installing {backend} failed: {state.error}")
        if state.status == Status.CANCELLED:
            raise Postpone(f"the installation of {backend} was cancelled", seconds=1.0)

    async def _follow_install(self, attempt: Attempt, child: UUID) -> Operation:
        """Mirrors the installation's bytes until it has ended; answers its row.

        Raises WorkerGone when it has to wait for its worker: it goes on by itself, the load tries elsewhere.
        """
        message = f"installing {attempt.definition.backend} on {attempt.slot.node_name}"
        share = _AND_FILES if attempt.payload else _SHARE_OF_INSTALL
        before = (await in_thread(Operation.objects.get, pk=child)).attempts
        with self._hints.watch(child) as watch:
            while (state := await in_thread(Operation.objects.get, pk=child)).status not in TERMINAL:
                if state.status == Status.WAITING or state.attempts > before:
                    raise WorkerGone(state.message)
                if state.total_bytes or state.time_limit_at is not None:
                    figures = attempt.tick(
                        "installing",
                        message,
                        current_bytes=state.current_bytes,
                        total_bytes=state.total_bytes,
                        percentage=state.progress * share,
                        progress_at=state.last_progress_at,
                        time_limit_at=state.time_limit_at,
                    )
                    attempt.work.progress(figures)
                    await attempt.hold.moved(state.current_bytes)
                await watch.changed(timeout=_LOOK_AT_CHILD)
        return state

    async def _start_engine(self, attempt: Attempt) -> dialling.Contact:
        starting = f"starting {attempt.definition.backend} on {attempt.slot.node_name}"
        await attempt.report("loading", starting, time_limit=conf.cluster().install_timeout)
        node = await in_thread(BackendNode.objects.filter(pk=attempt.slot.node_id).first)
        if node is None:
            raise WorkerGone(f"node {attempt.slot.node_name} is no longer registered")
        offered = install.offered_to(node)
        request = messages.InstallRequest(
            backend=attempt.definition.backend,
            model_id=attempt.definition.name,
            backend_galleries=offered.encoded,
            replica_index=attempt.slot.replica_index,
            op_id=str(attempt.work.id),
            gpus=pinning.gpus_of(attempt.slot),
        )
        reply = await _started(attempt, request, offered)
        # Also if it is refused below: its slot is free as soon as the engine is gone.
        await in_thread(slots.record_answer, attempt.slot)
        if not reply.address:
            raise NodeRefused(f"its worker reported no address for {attempt.process_key}")
        try:
            engine = await in_thread(dialling.accept, attempt.slot.node_id, reply.address, now=clock.now())
        except dialling.AddressRefused as refused:
            raise NodeRefused(refused.message) from refused
        await in_thread(slots.record_answer, attempt.slot, engine.address)
        pinning.check(reply, attempt.slot)
        # Before it loads: a request for a former engine of this address would reach the new one.
        if gone := await in_thread(
            retire.retire_at, engine.address, node_id=attempt.slot.node_id, but=attempt.slot.id
        ):
            log.info("%s on %s took the address of %s", attempt.process_key, node.name, ", ".join(gone))
        return engine

    async def _load(self, attempt: Attempt, engine: dialling.Contact, options: Mapping[str, Any]) -> None:
        limit = load_limit(attempt.payload, conf.cluster().model_load_timeout)
        await attempt.hold.lasts(limit + MARGIN)
        loading = f"loading {attempt.definition.name} on {attempt.slot.node_name}"
        await attempt.report("loading", loading, time_limit=limit)
        client = BackendClient(engine.address, engine.token)
        try:
            told = options_from_mapping(pinning.split(options, attempt.slot))
            result = await client.load_model(told, timeout=limit)
        except DeadlineExceeded as error:
            raise LoadFailed(
                f"loading {gib(attempt.payload)} took longer than {limit:.0f} s"
                " (LOCALAI_NATS_MODEL_LOAD_TIMEOUT); the engine is stopped"
            ) from error
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
                f" {names.readable(result.message) or 'no reason given'}"
            )


async def _listed(attempt: Attempt) -> messages.ListReply:
    """What the worker has installed; WorkerGone when another node is the better choice."""
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


async def _started(
    attempt: Attempt, request: messages.InstallRequest, offered: install.GalleryOffer
) -> messages.InstallReply:
    """The worker's answer to the start, waited for as long as the worker is there and the load is wanted."""
    backend = attempt.definition.backend
    while True:
        # Before each send: until the last one is answered, it may still reach the worker.
        if not await in_thread(slots.start, attempt.slot, attempt=attempt.id, now=clock.now()):
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
    """Says what the load waits for. Raises Abandoned when its time is over."""
    if over := placing.over(await in_thread(Operation.objects.get, pk=attempt.work.id), reason):
        raise over
    await attempt.report("loading", f"{reason}; asking again")


async def _give_up(attempt: Attempt) -> None:
    """Free the slot, or have the attempt's engine stopped if it may have one and still owns the slot.

    No other load uses the process key before the end of this engine is confirmed, which controllers see to.
    """
    engine = await in_thread(load_ends.give_up, attempt.slot, attempt=attempt.id, now=clock.now())
    if engine is not None:
        await attempt.worker.stop(attempt.process_key)


def _admit_install(attempt: Attempt) -> UUID:
    node = BackendNode.objects.filter(pk=attempt.slot.node_id).first()
    if node is None:
        raise WorkerGone(f"node {attempt.slot.node_name} is no longer registered")
    operation = attempt.work.operation
    asked = wishes.Asked([node], actor=operation.actor, request_id=operation.request_id, parent=operation)
    wish = wishes.Wish(wishes.INSTALL, attempt.definition.backend)
    return admission.ask(wish, asked, now=clock.now()).operation.id


async def _slot_lost(attempt: Attempt) -> NoReturn:
    """Wait; raise WorkerGone when the attempt does not own its slot any more."""
    while True:
        await asyncio.sleep(_LOOK_AT_SLOT)
        with contextlib.suppress(DatabaseError):
            if not await in_thread(slots.is_owned, attempt.slot, attempt=attempt.id):
                raise WorkerGone(f"node {attempt.slot.node_name} disconnected or restarted")
