"""The operations `model_unload` and `model_delete`: one target for each node, up to `AT_ONCE` at a time.

One transaction, under the attempt's fence, takes the replicas out of the picks before any command is sent.
Their requests may run until the row's deadline. Then each engine is stopped by key and address, again and
again until its worker confirms the stop or `STOP_WITHIN` has passed; only a confirmation removes the row. A
target ends with success or with an error, and the operation ends like its targets. An interrupted attempt is
repeated: every command is idempotent, and targets that have ended keep their result.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, assert_never
from uuid import UUID

from localai_cluster.kit import clock
from localai_cluster.kit.commit_hooks import committed
from localai_cluster.messaging.bus import Bus
from nodes.commands.commands import SETTLED_AFTER, Worker
from nodes.commands.outcomes import (
    BusDown,
    CommandFailed,
    Done,
    NoResponders,
    Refused,
    StillRunning,
    Unreadable,
)
from nodes.models import BackendNode, BroughtModel
from nodes.replicas import drains, engine_ends, stops, unload_requests
from nodes.replicas.lifecycle import Engine
from nodes.replicas.stops import StopResult
from operations import targets
from operations.executor.work import Work, in_thread
from operations.ledger import attempts
from operations.ledger.attempts import owned
from operations.ledger.progress import Tick
from operations.models import OperationTarget, TargetStatus

log = logging.getLogger(__name__)
R = TypeVar("R")

STOP_WITHIN = 45.0
"""Seconds for which an unconfirmed command is repeated; a worker has 20 for one stop."""
SILENT_FOR = SETTLED_AFTER
"""Seconds without a listener after which a worker counts as unreachable."""
ASK_AGAIN = 2.0
LOOK_EVERY = 0.25
AT_ONCE = 64
"""Nodes that one operation contacts at the same time."""


@dataclass(frozen=True)
class UnloadTarget:
    """A target of the operation: one node with the replicas to stop there."""

    node_id: UUID
    name: str
    status: str | None
    """Status of the node; None if it is no longer registered."""
    replicas: tuple[Engine, ...]

    def why_unreachable(self) -> str:
        """Return the reason why no command can be sent to the node; empty if one can."""
        if self.status is None:
            return "the node is no longer registered"
        return "the node is offline, so what runs there is not known" if self.status == "offline" else ""


@dataclass
class DrainWatch:
    """Watch that signals when a replica is idle or its deadline has passed; one query for all replicas."""

    work: Work
    parts: Sequence[UnloadTarget]
    reached: dict[UUID, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reached = {replica.id: asyncio.Event() for part in self.parts for replica in part.replicas}

    async def watch(self) -> None:
        """Poll until every replica is idle or past its deadline."""
        reported: dict[UUID, int] = {}
        while waiting := [id for id, event in self.reached.items() if not event.is_set()]:
            rows, now = await in_thread(drains.running_requests, waiting), clock.now()
            for id in waiting:
                requests, until = rows.get(id, (0, None))
                if not requests or until is None or until <= now:
                    self.reached[id].set()
            for part in self.parts:
                running = sum(rows.get(replica.id, (0, None))[0] for replica in part.replicas)
                if running and reported.get(part.node_id) != running:
                    reported[part.node_id] = running
                    plural = "request" if running == 1 else "requests"
                    self.work.progress(
                        _tick(part, "draining", f"waiting for {running} {plural} on {part.name}")
                    )
            await asyncio.sleep(LOOK_EVERY)


class UnloadModel:
    """Handler; one instance serves all operations of its controller."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the targets that have not ended; raise CommandFailed if any target failed."""
        parts = await in_thread(_drain_targets, work)
        quiet, bound = DrainWatch(work, parts), asyncio.Semaphore(AT_ONCE)
        await _run_all(quiet.watch(), *(self._part(work, part, quiet, bound) for part in parts))
        ended_targets = await in_thread(_targets, work)
        failed = [
            f"{part.node_name}: {part.error}" for part in ended_targets if part.status == TargetStatus.ERROR
        ]
        if failed:
            raise CommandFailed("; ".join(failed))
        return {"nodes": [part.node_name for part in ended_targets]}

    async def _part(
        self, work: Work, part: UnloadTarget, quiet: DrainWatch, bound: asyncio.Semaphore
    ) -> None:
        stops = (self._unload(work, part, replica, quiet, bound) for replica in part.replicas)
        problems = [problem for problem in await _run_all(*stops) if problem]
        problem = "; ".join(problems) or part.why_unreachable()
        if not problem:
            async with bound:
                problem = await self._then(work, part)
        if problem:
            log.warning("%s %s on %s: %s", work.operation.kind, work.operation.element, part.name, problem)
        status = TargetStatus.ERROR if problem else TargetStatus.SUCCESS
        await in_thread(attempts.target_done, *work.attempt, part.node_id, status, problem, now=clock.now())

    async def _then(self, work: Work, part: UnloadTarget) -> str:
        """Run further steps on the node after the stops; return the error, empty for success."""
        return ""

    async def _unload(
        self, work: Work, part: UnloadTarget, replica: Engine, quiet: DrainWatch, bound: asyncio.Semaphore
    ) -> str:
        """Stop one engine and remove its row; return the error, empty for success."""
        await quiet.reached[replica.id].wait()

        async def stop() -> StopResult | None:
            await work.report(_tick(part, "stopping", f"stopping {replica.process_key} on {part.name}"))
            return await stops.send_stop(self._bus, replica, part.name)

        async with bound:
            stopped = await _until_confirmed(stop)
        if stopped is None:
            return await in_thread(_reason_not_stopped, part, replica)
        if stopped.gone:
            await in_thread(engine_ends.confirm, replica.id, stop_sent=stopped.sent_at)
            return ""
        await in_thread(stops.record_failure, replica, stopped.reason, now=clock.now())
        return f"{replica.process_key} may still run: {stopped.reason}"


class DeleteModel(UnloadModel):
    """Handler that unloads the model and removes its files on each node where it does not run any more."""

    async def _then(self, work: Work, part: UnloadTarget) -> str:
        model = work.operation.element

        async def delete() -> StopResult | None:
            await work.report(_tick(part, "deleting", f"removing the files of {model} on {part.name}"))
            if await in_thread(unload_requests.loading_there, model, part.node_id) is not None:
                return StopResult(True, f"{model} is being loaded there; its files stay")
            answer = await Worker(self._bus, str(part.node_id), part.name).delete_model(model)
            match answer:
                case Done():
                    await in_thread(forget_staged_files, part.node_id, model)
                    return StopResult(True)
                case Refused(reason) | Unreadable(reason):
                    return StopResult(True, reason)
                case NoResponders(reason):
                    return StopResult(False, reason, silent=True)
                case StillRunning(reason) | BusDown(reason):
                    return StopResult(False, reason)
                case _:
                    assert_never(answer)

        deletion = await _until_confirmed(delete)
        return deletion.reason if deletion else ""


def forget_staged_files(node_id: UUID, model_name: str) -> None:
    """Delete the record of the model's files, which were deleted on the node."""
    with committed("unload.files"):
        BroughtModel.objects.filter(node_id=node_id, model_name=model_name).delete()


async def _until_confirmed(command: Callable[[], Awaitable[StopResult | None]]) -> StopResult | None:
    """Repeat a command until it has a final result, the worker is unreachable, or time is up."""
    began, silent_since = clock.monotonic(), None
    while True:
        stopped, now = await command(), clock.monotonic()
        if stopped is None or stopped.gone:
            return stopped
        silent_since = (silent_since or now) if stopped.silent else None
        if now - began >= STOP_WITHIN or (silent_since and now - silent_since >= SILENT_FOR):
            return stopped
        await asyncio.sleep(ASK_AGAIN)


def _drain_targets(work: Work) -> list[UnloadTarget]:
    """Take the replicas out of the picks; return the targets that have not ended yet.

    Raises LeaseLost before any write if another attempt owns the operation.
    """
    payload, now = work.operation.payload, clock.now()
    with committed("unload.begin"):
        owned(*work.attempt)
        unfinished = [part for part in _targets(work) if part.status not in targets.ENDED]
        ids = [part.node_id for part in unfinished]
        rows = drains.drain_for_unload(
            work.operation.element,
            ids,
            index=payload.get("replica_index"),
            deadline=now + timedelta(seconds=payload["grace"]),
            operation_id=work.id,
            now=now,
        )
        states = dict(BackendNode.objects.filter(pk__in=ids).values_list("id", "status"))
    return [
        UnloadTarget(
            part.node_id,
            part.node_name,
            states.get(part.node_id),
            tuple(row for row in rows if row.node_id == part.node_id),
        )
        for part in unfinished
    ]


def _targets(work: Work) -> list[OperationTarget]:
    return list(OperationTarget.objects.filter(operation_id=work.id).order_by("node_name"))


def _reason_not_stopped(part: UnloadTarget, replica: Engine) -> str:
    """Return the reason why no stop was sent: the row has gone with its node, or the replica is in use."""
    if drains.is_in_use(replica):
        return f"{replica.process_key} is in use again: try again"
    status = BackendNode.objects.filter(pk=part.node_id).values_list("status", flat=True).first()
    return UnloadTarget(part.node_id, part.name, status, ()).why_unreachable()


async def _run_all(*work: Awaitable[R]) -> list[R]:
    """Run all awaitables concurrently; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tick(part: UnloadTarget, phase: str, message: str) -> Tick:
    return Tick(phase, message, node_id=part.node_id, node_name=part.name)
