"""Executor of a queue: claims due items, runs each as a task, and renews their leases.

A queue (`queue.py`) defines which items are due and how they run: operations are one queue
(`operation_queue.py`), intents on nodes another. An executor claims at each wake-up, and at least once a
second, and renews all its leases in one call, from a thread of its own (`leases.py`). When a lease is lost or
the item was cancelled, the executor cancels the task, which writes nothing: the fence would refuse it anyway.
If the database cannot be reached for a whole lease, the executor stops all its tasks, because by then another
controller may have claimed them.

An item whose outcome could not be recorded stays claimed until its lease expires. Every executor reaps such
items; the schedule does so too, but recovery must not depend on one process.
"""

import asyncio
import contextlib
import logging
from typing import Generic
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster.kit import clock
from operations.executor.leases import LeaseKeeper
from operations.executor.queue import C, Queue
from operations.executor.work import in_thread
from operations.ledger.fence import LeaseLost
from operations.ledger.progress import Attempt

log = logging.getLogger(__name__)


LOOK_EVERY = 1.0
"""Seconds between two polls of the rows without a wake-up."""
CLAIMED_AT_ONCE = 1024
_RENEWALS_PER_LEASE = 8
"""A renewal skips rows that are locked at that moment, so each lease gets several renewals."""


class Executor(Generic[C]):
    """Runs the items of one queue, under leases of `lease` seconds."""

    def __init__(self, owner: str, queue: Queue[C], *, lease: float) -> None:
        self._owner, self._queue, self._lease = owner, queue, lease
        self._tasks: dict[UUID, tuple[int, asyncio.Task[None]]] = {}
        self._wake_up, self._renew = asyncio.Event(), asyncio.Event()
        self._claiming = asyncio.Lock()
        self._terminating: set[asyncio.Task[None]] = set()
        self._reap_at = clock.monotonic()
        self._stopping = False
        queue.on_lost(self._lost)

    def running(self) -> int:
        """Return the number of running attempts. Thread-safe."""
        return len(self._tasks)

    def hint(self, *, cancelled: bool = False) -> None:
        """Wake the executor, because an item may be due or have been cancelled."""
        self._wake_up.set()
        if cancelled:
            self._renew.set()

    async def run(self) -> None:
        """Claim and run items until `stop`; the loops are supervised together."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claim_loop())
            group.create_task(self._lease_loop())

    async def stop(self) -> None:
        """Cancel the running attempts and release their operations at once."""
        self._stopping = True
        self._wake_up.set()
        async with self._claiming:  # a running claim commits first, so that it is released too
            await asyncio.gather(*self._cancel_attempts(list(self._tasks)), return_exceptions=True)
            self._queue.close()
            try:
                await in_thread(self._queue.release, self._owner, now=clock.now())
            except DatabaseError:
                log.warning("leases could not be handed back; they run out by themselves", exc_info=True)

    async def _claim_loop(self) -> None:
        while not self._stopping:
            self._wake_up.clear()
            try:
                await self._reap()
                await self.claim_once()
            except DatabaseError as error:
                log.warning("cannot claim %s: %s", self._queue.name, error)
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._wake_up.wait()
            except TimeoutError:
                continue

    async def _reap(self) -> None:
        """Requeue expired items of any controller, twice per lease."""
        if clock.monotonic() >= self._reap_at:
            await in_thread(self._queue.reap)
            self._reap_at = clock.monotonic() + self._lease / 2

    async def claim_once(self) -> int:
        """Claim the due items and start them; return their number."""
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
                self._wake_up.set()  # more may be due; the claimed items start meanwhile
            return len(claimed)

    def _begin(self, claim: C) -> None:
        previous = self._tasks.get(claim.id)
        if previous is not None:
            previous[1].cancel()  # its lease expired, and this executor claimed the item again
        task = asyncio.create_task(self._carry_out(claim), name=str(claim))
        self._tasks[claim.id] = (claim.fence, task)
        # Not in the task itself: a task that is cancelled before its first step never cleans up.
        task.add_done_callback(lambda done: self._ended((claim.id, claim.fence), done))

    def _ended(self, attempt: Attempt, task: "asyncio.Task[None]") -> None:
        self._queue.forget(attempt)
        current = self._tasks.get(attempt[0])
        if current is not None and current[1] is task:
            del self._tasks[attempt[0]]
        self._wake_up.set()

    def _lost(self, attempt: Attempt) -> None:
        """Cancel an attempt whose report was refused, because it has lost its lease."""
        if self._runs(attempt):
            log.warning("%s: the lease was lost; this attempt stops", attempt[0])
            self._cancel_attempts([attempt[0]])

    def _runs(self, attempt: Attempt) -> bool:
        """Return True if exactly this attempt runs here; a later attempt of the same item does not count."""
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
            renewed_at, fences = clock.monotonic(), {id: fence for id, (fence, _) in self._tasks.items()}
            try:
                held = await keeper.renew(fences)
            except (DatabaseError, TimeoutError) as error:
                log.warning("cannot renew leases: %s", error or "no answer from the database")
                if clock.monotonic() >= good_until:
                    self._cancel_attempts(list(self._tasks))
                continue
            good_until = renewed_at + self._lease
            lost = [id for id, fence in fences.items() if held.get(id) != fence and self._runs((id, fence))]
            self._cancel_attempts(lost)

    def _cancel_attempts(self, ids: list[UUID]) -> list[asyncio.Task[None]]:
        """Cancel these attempts and stop renewing their leases.

        The lease loop does not wait for their end: a slow attempt would cost all others their leases.
        """
        attempts = [self._tasks.pop(id)[1] for id in ids if id in self._tasks]
        for attempt in attempts:
            attempt.cancel()
            self._terminating.add(attempt)
            attempt.add_done_callback(self._terminating.discard)
        return attempts

    async def _carry_out(self, claimed: C) -> None:
        try:
            await self._queue.carry_out(claimed)
        except LeaseLost:
            log.warning("%s (%s): the lease was lost; this attempt stops", claimed, claimed.id)
        except DatabaseError as error:
            # The outcome could not be written; the lease expires and the item is claimed again.
            log.warning("%s (%s): outcome not recorded: %s", claimed, claimed.id, error)
