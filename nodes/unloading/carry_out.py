"""The operations `model_unload` and `model_delete`: one part for each node, all parts at once within a bound.

The replicas leave the picks in one transaction, under the attempt's fence, before any command is sent. Their
requests may end until the deadline that the row carries. Then each engine is stopped by key and address, and
again until its worker confirms it or `STOP_WITHIN` has passed; only a confirmation removes the row. A part
ends with success or with the reason, and the operation ends as its parts did. An attempt that was cut off is
repeated: every command may be, and parts that have ended stay as they ended.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, assert_never
from uuid import UUID

from localai_cluster import clock
from localai_cluster.commits import committed
from localai_cluster.messaging.bus import Bus
from nodes.backends.commands import SETTLED_AFTER, Worker
from nodes.backends.one_node import CommandFailed
from nodes.backends.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.loading.exact_stop import Stopped, stop_exactly
from nodes.models import BackendNode
from nodes.replicas import drains, retire, stops
from nodes.replicas.lifecycle import Engine
from nodes.staging import brought
from nodes.unloading import asking
from operations import targets
from operations.executor.work import Work, in_thread
from operations.ledger import outcome
from operations.ledger.fence import owned
from operations.ledger.progress import Tick
from operations.models import OperationTarget, TargetStatus

log = logging.getLogger(__name__)
R = TypeVar("R")

STOP_WITHIN = 45.0
"""Seconds for which a command is repeated that a worker does not confirm: it has 20 for one stop."""
SILENT_FOR = SETTLED_AFTER
"""Seconds without a listener after which a worker counts as unreachable."""
ASK_AGAIN = 2.0
LOOK_EVERY = 0.25
AT_ONCE = 64
"""Nodes that one operation talks to at the same time."""


@dataclass(frozen=True)
class Part:
    """What the operation has to do on one node."""

    node_id: UUID
    name: str
    status: str | None
    """The node's; None when it is no longer registered."""
    replicas: tuple[Engine, ...]

    def why_unreachable(self) -> str:
        """Why no command is sent there; empty if one can be."""
        if self.status is None:
            return "the node is no longer registered"
        return "the node is offline, so what runs there is not known" if self.status == "offline" else ""


@dataclass
class Quiet:
    """Tells when nothing runs on a replica any more or its deadline has passed; one query for all."""

    work: Work
    parts: Sequence[Part]
    reached: dict[UUID, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reached = {replica.id: asyncio.Event() for part in self.parts for replica in part.replicas}

    async def watch(self) -> None:
        """Looks until every replica is quiet."""
        said: dict[UUID, int] = {}
        while waiting := [id for id, event in self.reached.items() if not event.is_set()]:
            rows, now = await in_thread(drains.running, waiting), clock.now()
            for id in waiting:
                requests, until = rows.get(id, (0, None))
                if not requests or until is None or until <= now:
                    self.reached[id].set()
            for part in self.parts:
                left = sum(rows.get(replica.id, (0, None))[0] for replica in part.replicas)
                if left and said.get(part.node_id) != left:
                    said[part.node_id] = left
                    plural = "request" if left == 1 else "requests"
                    self.work.progress(_tick(part, "draining", f"waiting for {left} {plural} on {part.name}"))
            await asyncio.sleep(LOOK_EVERY)


class UnloadModel:
    """Handler; one instance serves all operations of its controller."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Carries out what is left of the parts, and ends as they did."""
        parts = await in_thread(_begin, work)
        quiet, bound = Quiet(work, parts), asyncio.Semaphore(AT_ONCE)
        await _all(quiet.watch(), *(self._part(work, part, quiet, bound) for part in parts))
        ended = await in_thread(_ended, work)
        failed = [f"{part.node_name}: {part.error}" for part in ended if part.status == TargetStatus.ERROR]
        if failed:
            raise CommandFailed("; ".join(failed))
        return {"nodes": [part.node_name for part in ended]}

    async def _part(self, work: Work, part: Part, quiet: Quiet, bound: asyncio.Semaphore) -> None:
        stops = (self._unload(work, part, replica, quiet, bound) for replica in part.replicas)
        problems = [problem for problem in await _all(*stops) if problem]
        problem = "; ".join(problems) or part.why_unreachable()
        if not problem:
            async with bound:
                problem = await self._then(work, part)
        if problem:
            log.warning("%s %s on %s: %s", work.operation.kind, work.operation.element, part.name, problem)
        status = TargetStatus.ERROR if problem else TargetStatus.SUCCESS
        await in_thread(outcome.target_done, *work.attempt, part.node_id, status, problem, now=clock.now())

    async def _then(self, work: Work, part: Part) -> str:
        """What else is to be done on the node; answers what went wrong."""
        return ""

    async def _unload(
        self, work: Work, part: Part, replica: Engine, quiet: Quiet, bound: asyncio.Semaphore
    ) -> str:
        """Has one engine stopped and removes its row; answers what went wrong."""
        await quiet.reached[replica.id].wait()

        async def stop() -> Stopped | None:
            await work.report(_tick(part, "stopping", f"stopping {replica.process_key} on {part.name}"))
            if not await in_thread(stops.record_sent, replica, now=clock.now()):
                return None
            worker = Worker(self._bus, str(part.node_id), part.name)
            return await stop_exactly(
                worker, replica.process_key, replica.address, lambda: in_thread(stops.is_due, replica)
            )

        async with bound:
            stopped = await _until_gone(stop)
        if stopped is None:
            return await in_thread(_why_not_leaving, part, replica)
        if stopped.gone:
            await in_thread(retire.confirm, replica.id, stop_sent=stopped.sent_at)
            return ""
        await in_thread(stops.record_failure, replica, stopped.reason, now=clock.now())
        return f"{replica.process_key} may still run: {stopped.reason}"


class DeleteModel(UnloadModel):
    """The same, and the model's files are removed on each node where nothing of it runs any more."""

    async def _then(self, work: Work, part: Part) -> str:
        model = work.operation.element

        async def delete() -> Stopped | None:
            await work.report(_tick(part, "deleting", f"removing the files of {model} on {part.name}"))
            if await in_thread(asking.loading_there, model, part.node_id) is not None:
                return Stopped(True, f"{model} is being loaded there; its files stay")
            answer = await Worker(self._bus, str(part.node_id), part.name).delete_model(model)
            match answer:
                case Done():
                    await in_thread(brought.forget, part.node_id, model)
                    return Stopped(True)
                case Refused(reason) | Unreadable(reason):
                    return Stopped(True, reason)
                case NoResponders(reason):
                    return Stopped(False, reason, silent=True)
                case StillRunning(reason) | BusDown(reason):
                    return Stopped(False, reason)
                case _:
                    assert_never(answer)

        ended = await _until_gone(delete)
        return ended.reason if ended else ""


async def _until_gone(ask: Callable[[], Awaitable[Stopped | None]]) -> Stopped | None:
    """Repeats a command until it is answered for good, the worker is unreachable, or time is up."""
    began, silent_since = clock.monotonic(), None
    while True:
        stopped, now = await ask(), clock.monotonic()
        if stopped is None or stopped.gone:
            return stopped
        silent_since = (silent_since or now) if stopped.silent else None
        if now - began >= STOP_WITHIN or (silent_since and now - silent_since >= SILENT_FOR):
            return stopped
        await asyncio.sleep(ASK_AGAIN)


def _begin(work: Work) -> list[Part]:
    """Takes the replicas out of the picks; answers the parts that have not ended yet.

    Raises LeaseLost before anything is written when the operation is another attempt's.
    """
    asked, now = work.operation.payload, clock.now()
    with committed("unload.begin"):
        owned(*work.attempt)
        left = [part for part in _ended(work) if part.status not in targets.ENDED]
        ids = [part.node_id for part in left]
        rows = drains.drain(
            work.operation.element,
            ids,
            index=asked.get("replica_index"),
            deadline=now + timedelta(seconds=asked["grace"]),
            operation_id=work.id,
            now=now,
        )
        states = dict(BackendNode.objects.filter(pk__in=ids).values_list("id", "status"))
    return [
        Part(
            part.node_id,
            part.node_name,
            states.get(part.node_id),
            tuple(row for row in rows if row.node_id == part.node_id),
        )
        for part in left
    ]


def _ended(work: Work) -> list[OperationTarget]:
    return list(OperationTarget.objects.filter(operation_id=work.id).order_by("node_name"))


def _why_not_leaving(part: Part, replica: Engine) -> str:
    """A row went without us: with a worker that started again, or with a node that is lost. Or it serves."""
    if drains.serves(replica):
        return f"{replica.process_key} was put back and serves: try again"
    status = BackendNode.objects.filter(pk=part.node_id).values_list("status", flat=True).first()
    return Part(part.node_id, part.name, status, ()).why_unreachable()


async def _all(*work: Awaitable[R]) -> list[R]:
    """Does all of it; the first failure ends the rest and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tick(part: Part, phase: str, message: str) -> Tick:
    return Tick(phase, message, node_id=part.node_id, node_name=part.name)
