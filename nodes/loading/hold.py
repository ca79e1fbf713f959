"""Until when one more replica is wanted, which no request waits for: a deadline that moves (R2.24).

A load that a request waits for is wanted as long as that waits. Any other one is wanted for as long as an
installation and a load may take, and longer while something moves: bytes, or a LoadModel under way. The row
keeps the deadline, so that another controller goes on with it.
"""

from datetime import timedelta

from localai_cluster import clock, conf
from nodes.loading.wish import wish_of
from nodes.placement import deadlines
from operations.executor.work import Work, in_thread
from operations.ledger import admission

_AT_MOST_EVERY = deadlines.STALL / 20


def base() -> float:
    """How long such a load is wanted at first, in seconds."""
    cluster = conf.cluster()
    return deadlines.hold(cluster.install_timeout, cluster.model_load_timeout)


class MovingWish:
    """One attempt's."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._moved_at = -_AT_MOST_EVERY
        self._bytes = 0

    async def moved(self, current_bytes: int) -> None:
        """Bytes came, if there are more than before: it is wanted for `STALL` from now."""
        if current_bytes > self._bytes and clock.monotonic() >= self._moved_at + _AT_MOST_EVERY:
            self._bytes, self._moved_at = current_bytes, clock.monotonic()
            await self.lasts(min(deadlines.STALL, base()))

    async def lasts(self, seconds: float) -> None:
        """What begins now may take so long."""
        operation, now = self._work.operation, clock.now()
        if wish_of(operation).another:
            age = (now - operation.created_at).total_seconds()
            left = deadlines.pushed_on(age, seconds, base())
            await in_thread(admission.need_until, operation.id, now + timedelta(seconds=left))
