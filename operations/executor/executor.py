"""Carries operations out: claim, run the handler registered for the kind, keep the lease, record the outcome.

One executor lives in every controller. It claims what is due when a hint arrives and once a second without
one, runs each operation as its own task, and renews all its leases together, from a thread of its own
(`leases.py`). Progress is written in batches (`recorder.py`). A handler ends in one of four
ways: it returns a result (completed), raises a ClusterError (failed), raises `Postpone` (tried or looked at
again, with the reason), or raises `Abandoned` (cancelled). When a lease is lost, the task is cancelled and
writes nothing: the fence would refuse it anyway. If the database cannot be reached for a whole lease, the
executor stops all its tasks by itself, because by then another controller may have taken over.

What an attempt could not record stays in process until its lease runs out. Every executor takes such
operations back; the schedule does the same, but nothing must wait for one process to be there.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

from localai_cluster import clock, errors
from localai_cluster.logs import request_id
from operations.executor.leases import LeaseKeeper
from operations.executor.recorder import Batch, Recorder
from operations.executor.work import Abandoned, Handler, Postpone, Work, in_thread
from operations.ledger import lease, outcome, progress
from operations.ledger.fence import LeaseLost
from operations.ledger.progress import Attempt
from operations.models import Operation
from operations.reconcilers import tasks
from operations.states import Event

log = logging.getLogger(__name__)


LOOK_EVERY = 1.0
"""Seconds between two looks at the rows when no hint arrives."""
_RENEWALS_PER_LEASE = 8
"""A renewal leaves out the rows that are locked at that moment: several chances keep every lease."""


async def write_batch(batch: Batch) -> set[Attempt]:
    """Writes reports in one of the shared threads."""
    return await in_thread(progress.record, batch, now=clock.now(), lock_timeout=progress.BATCH_LOCK_TIMEOUT)


class Executor:
    """Runs up to `slots` operations at once under leases of `lease` seconds."""

    def __init__(
        self, owner: str, handlers: Mapping[str, Handler], *, lease: float, slots: int = 256
    ) -> None:
        self._owner, self._handlers, self._lease, self._slots = owner, dict(handlers), lease, slots
        self._tasks: dict[UUID, tuple[int, asyncio.Task[None]]] = {}
        self._look = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._reap_at = clock.monotonic()
        self._recorder = Recorder(write_batch, self._lost)
        self._stopping = False

    def hint(self) -> None:
        """Something may be due; look now."""
        self._look.set()

    async def run(self) -> None:
        """Claims and runs until `stop`; the loops are supervised together."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claim_loop())
            group.create_task(self._lease_loop())

    async def stop(self) -> None:
        """Ends the running attempts and hands their operations back at once."""
        self._stopping = True
        self._look.set()
        async with self._claiming:  # a claim under way commits first, so that it is handed back too
            await asyncio.gather(*self._let_go(list(self._tasks)), return_exceptions=True)
            self._recorder.close()
            try:
                await in_thread(lease.release, self._owner, now=clock.now())
            except DatabaseError:
                log.warning("leases could not be handed back; they run out by themselves", exc_info=True)

    async def _claim_loop(self) -> None:
        while not self._stopping:
            self._look.clear()
            try:
                await self._reap()
                await self.claim_once()
            except DatabaseError as error:
                log.warning("cannot claim operations: %s", error)
            try:
                await asyncio.wait_for(self._look.wait(), timeout=LOOK_EVERY)
            except TimeoutError:
                continue

    async def _reap(self) -> None:
        """Has what any controller let go of tried again; twice a lease."""
        if clock.monotonic() >= self._reap_at:
            await in_thread(tasks.reap)
            self._reap_at = clock.monotonic() + self._lease / 2

    async def claim_once(self) -> int:
        """One look: claims what is due and starts it; answers how many."""
        async with self._claiming:
            if self._stopping:
                return 0
            free = self._slots - len(self._tasks)
            # A child must never wait for a slot that its own parent holds while waiting for it.
            claimed = await in_thread(
                lease.claim,
                self._owner,
                now=clock.now(),
                lease=self._lease,
                limit=free if free > 0 else self._slots,
                children_only=free <= 0,
            )
            for operation in claimed:
                self._begin(operation)
            return len(claimed)

    def _begin(self, operation: Operation) -> None:
        former = self._tasks.get(operation.id)
        if former is not None:
            former[1].cancel()  # its lease ran out during a pause, and this executor was the next to claim
        task = asyncio.create_task(self._carry_out(operation), name=str(operation))
        self._tasks[operation.id] = (operation.fence, task)
        # Not by the task itself: one that is cancelled before its first step never clears up.
        task.add_done_callback(lambda done: self._ended((operation.id, operation.fence), done))

    def _ended(self, attempt: Attempt, task: "asyncio.Task[None]") -> None:
        self._recorder.forget(attempt)
        current = self._tasks.get(attempt[0])
        if current is not None and current[1] is task:
            del self._tasks[attempt[0]]
        self._look.set()

    def _lost(self, attempt: Attempt) -> None:
        """A report was refused: the operation is no longer this attempt's."""
        if self._runs(attempt):
            log.warning("%s: the lease was lost; this attempt stops", attempt[0])
            self._let_go([attempt[0]])

    def _runs(self, attempt: Attempt) -> bool:
        """Whether this very attempt runs here: a later one of the same operation may have begun since."""
        current = self._tasks.get(attempt[0])
        return current is not None and current[0] == attempt[1]

    async def _lease_loop(self) -> None:
        keeper = LeaseKeeper(self._owner, self._lease)
        try:
            await self._keep_leases(keeper)
        finally:
            await keeper.close()

    async def _keep_leases(self, keeper: LeaseKeeper) -> None:
        good_until = clock.monotonic() + self._lease
        while not self._stopping:
            await asyncio.sleep(self._lease / _RENEWALS_PER_LEASE)
            asked_at, asked = clock.monotonic(), {id: fence for id, (fence, _) in self._tasks.items()}
            try:
                held = await keeper.renew(asked)
            except (DatabaseError, TimeoutError) as error:
                log.warning("cannot renew leases: %s", error or "no answer from the database")
                if clock.monotonic() >= good_until:
                    self._let_go(list(self._tasks))
                continue
            good_until = asked_at + self._lease
            lost = [id for id, fence in asked.items() if held.get(id) != fence and self._runs((id, fence))]
            self._let_go(lost)

    def _let_go(self, ids: list[UUID]) -> list[asyncio.Task[None]]:
        """Cancels these attempts and renews them no more.

        Nobody who keeps leases may wait for their end: one that takes its time would cost all others theirs.
        """
        attempts = [self._tasks.pop(id)[1] for id in ids if id in self._tasks]
        for attempt in attempts:
            attempt.cancel()
            self._leaving.add(attempt)
            attempt.add_done_callback(self._leaving.discard)
        return attempts

    async def _carry_out(self, operation: Operation) -> None:
        request_id.set(operation.request_id or str(operation.id))
        work = Work(operation, self._recorder)
        log.info(
            "%s %s (%s): start, fence %d", operation.kind, operation.element, operation.id, operation.fence
        )
        try:
            await self._attempt(work)
        except LeaseLost:
            log.warning("%s (%s): the lease was lost; this attempt stops", operation.kind, operation.id)
        except DatabaseError as error:
            # The outcome could not be written; the lease runs out and the operation is tried again.
            log.warning("%s (%s): outcome not recorded: %s", operation.kind, operation.id, error)

    async def _attempt(self, work: Work) -> None:
        handler = self._handlers.get(work.operation.kind)
        try:
            if handler is None:
                raise errors.NotFound(f"no handler for operations of kind {work.operation.kind}")
            result = await handler(work)
        except Postpone as pause:
            await self._put_back(work, pause)
        except Abandoned as reason:
            await self._finish(work, Event.CANCEL, message=str(reason))
        except errors.ClusterError as failure:
            await self._finish(work, Event.FAIL, error=failure.message)
        except (LeaseLost, OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("%s (%s): unexpected failure", work.operation.kind, work.id)
            await self._finish(
                work, Event.FAIL, error=f"internal error; the log has it under {request_id.get()}"
            )
        else:
            await self._finish(work, Event.COMPLETE, result=result)

    async def _finish(self, work: Work, event: Event, **said: Any) -> None:
        log.info(
            "%s %s (%s): %s %s",
            work.operation.kind,
            work.operation.element,
            work.id,
            event,
            said.get("error") or said.get("message") or "",
        )
        ticks = await self._recorder.take(work.attempt)
        await in_thread(outcome.finish, *work.attempt, event, now=clock.now(), ticks=ticks, **said)

    async def _put_back(self, work: Work, pause: Postpone) -> None:
        log.info(
            "%s %s (%s): %s; again in %.1f s",
            work.operation.kind,
            work.operation.element,
            work.id,
            pause.reason,
            pause.seconds,
        )
        ticks, now = await self._recorder.take(work.attempt), clock.now()
        await in_thread(
            outcome.put_back,
            work.id,
            work.operation.fence,
            Event.WAIT if pause.waiting else Event.POSTPONE,
            now=now,
            until=now + timedelta(seconds=pause.seconds),
            reason=pause.reason,
            payload=pause.payload,
            ticks=ticks,
        )
