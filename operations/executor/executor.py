"""Carries work out: claim what is due from a queue, run each piece as a task, keep the leases.

A queue (`queue.py`) says what is due and what carrying it out means: operations are one
(`operation_queue.py`), intents on nodes another. An executor claims when a hint arrives and once a second
without one, and renews all its leases together, from a thread of its own (`leases.py`). When a lease is
lost, or the work was cancelled, the task is cancelled and writes nothing: the fence would refuse it anyway.
If the database cannot be reached for a whole lease, the executor stops all its tasks by itself, because by
then another controller may have taken over.

What an attempt could not record stays claimed until its lease runs out. Every executor has such work taken
back; the schedule does the same, but nothing must wait for one process to be there.
"""

import asyncio
import contextlib
import logging
from typing import Generic
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster import clock
from operations.executor.leases import LeaseKeeper
from operations.executor.queue import C, Queue
from operations.executor.work import in_thread
from operations.ledger.fence import LeaseLost
from operations.ledger.progress import Attempt

log = logging.getLogger(__name__)


LOOK_EVERY = 1.0
"""Seconds between two looks at the rows when no hint arrives."""
CLAIMED_AT_ONCE = 1024
_RENEWALS_PER_LEASE = 8
"""A renewal leaves out the rows that are locked at that moment: several chances keep every lease."""


class Executor(Generic[C]):
    """Runs what one queue has, under leases of `lease` seconds."""

    def __init__(self, owner: str, queue: Queue[C], *, lease: float) -> None:
        self._owner, self._queue, self._lease = owner, queue, lease
        self._tasks: dict[UUID, tuple[int, asyncio.Task[None]]] = {}
        self._look, self._renew = asyncio.Event(), asyncio.Event()
        self._claiming = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._reap_at = clock.monotonic()
        self._stopping = False
        queue.on_lost(self._lost)

    def running(self) -> int:
        """How many attempts run now; from any thread."""
        return len(self._tasks)

    def hint(self, *, cancelled: bool = False) -> None:
        """Something may be due, or have been cancelled; look now."""
        self._look.set()
        if cancelled:
            self._renew.set()

    async def run(self) -> None:
        """Claim and run until `stop`; the loops are supervised together."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claim_loop())
            group.create_task(self._lease_loop())

    async def stop(self) -> None:
        """End the running attempts and hand their operations back at once."""
        self._stopping = True
        self._look.set()
        async with self._claiming:  # a claim under way commits first, so that it is handed back too
            await asyncio.gather(*self._let_go(list(self._tasks)), return_exceptions=True)
            self._queue.close()
            try:
                await in_thread(self._queue.release, self._owner, now=clock.now())
            except DatabaseError:
                log.warning("leases could not be handed back; they run out by themselves", exc_info=True)

    async def _claim_loop(self) -> None:
        while not self._stopping:
            self._look.clear()
            try:
                await self._reap()
                await self.claim_once()
            except DatabaseError as error:
                log.warning("cannot claim %s: %s", self._queue.name, error)
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _reap(self) -> None:
        """Has what any controller let go of tried again; twice a lease."""
        if clock.monotonic() >= self._reap_at:
            await in_thread(self._queue.reap)
            self._reap_at = clock.monotonic() + self._lease / 2

    async def claim_once(self) -> int:
        """One look: claims what is due and starts it; answers how many."""
        async with self._claiming:
            if self._stopping:
                return 0
            free = min(self._queue.slots - len(self._tasks), CLAIMED_AT_ONCE)
            if free <= 0:
                return 0
            claimed = await in_thread(
                self._queue.claim, self._owner, now=clock.now(), lease=self._lease, limit=free
            )
            for claim in claimed:
                self._begin(claim)
            if len(claimed) == CLAIMED_AT_ONCE:
                self._look.set()  # there may be more; what was claimed begins meanwhile
            return len(claimed)

    def _begin(self, claimed: C) -> None:
        former = self._tasks.get(claimed.id)
        if former is not None:
            former[1].cancel()  # its lease ran out during a pause, and this executor was the next to claim
        task = asyncio.create_task(self._carry_out(claimed), name=str(claimed))
        self._tasks[claimed.id] = (claimed.fence, task)
        # Not by the task itself: one that is cancelled before its first step never clears up.
        task.add_done_callback(lambda done: self._ended((claimed.id, claimed.fence), done))

    def _ended(self, attempt: Attempt, task: "asyncio.Task[None]") -> None:
        self._queue.forget(attempt)
        current = self._tasks.get(attempt[0])
        if current is not None and current[1] is task:
            del self._tasks[attempt[0]]
        self._look.set()

    def _lost(self, attempt: Attempt) -> None:
        """A report was refused: the work is no longer this attempt's."""
        if self._runs(attempt):
            log.warning("%s: the lease was lost; this attempt stops", attempt[0])
            self._let_go([attempt[0]])

    def _runs(self, attempt: Attempt) -> bool:
        """Whether this very attempt runs here: a later one of the same work may have begun since."""
        current = self._tasks.get(attempt[0])
        return current is not None and current[0] == attempt[1]

    async def _lease_loop(self) -> None:
        keeper = LeaseKeeper(self._owner, self._lease, self._queue.renew)
        try:
            await self._keep_leases(keeper)
        finally:
            await keeper.close()

    async def _keep_leases(self, keeper: LeaseKeeper) -> None:
        good_until = clock.monotonic() + self._lease
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease / _RENEWALS_PER_LEASE):
                    await self._renew.wait()
            self._renew.clear()
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
        """Cancel these attempts and renew them no more.

        The task that keeps leases does not wait for their end: a slow one would cost all others theirs.
        """
        attempts = [self._tasks.pop(id)[1] for id in ids if id in self._tasks]
        for attempt in attempts:
            attempt.cancel()
            self._leaving.add(attempt)
            attempt.add_done_callback(self._leaving.discard)
        return attempts

    async def _carry_out(self, claimed: C) -> None:
        try:
            await self._queue.carry_out(claimed)
        except LeaseLost:
            log.warning("%s (%s): the lease was lost; this attempt stops", claimed, claimed.id)
        except DatabaseError as error:
            # The outcome could not be written; the lease runs out and the work is taken up again.
            log.warning("%s (%s): outcome not recorded: %s", claimed, claimed.id, error)
