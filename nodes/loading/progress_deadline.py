"""Progress deadline of a scale-up, which no request waits for (R2.24).

A load with a waiting request is needed as long as the request waits. A scale-up expires after the install and
load limits, and later while it makes progress: bytes arrive, or LoadModel runs. The row stores the deadline,
so that another controller continues with it.
"""

from datetime import timedelta

from localai_cluster.kit import clock, conf
from nodes.loading.load_request import request_of
from nodes.placement import deadlines
from operations.executor.work import Work, in_thread
from operations.ledger import admission

_AT_MOST_EVERY = deadlines.STALL / 20


def initial_seconds() -> float:
    """Return the initial progress deadline of a scale-up, in seconds."""
    cluster = conf.cluster()
    return deadlines.progress_deadline(cluster.install_timeout, cluster.model_load_timeout)


class ProgressDeadline:
    """The progress deadline of one attempt; only that of a scale-up moves."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._moved_at = -_AT_MOST_EVERY
        self._bytes = 0

    async def extend_on_progress(self, current_bytes: int) -> None:
        """Extend the deadline to `STALL` from now if there are more bytes than before."""
        if current_bytes > self._bytes and clock.monotonic() >= self._moved_at + _AT_MOST_EVERY:
            self._bytes, self._moved_at = current_bytes, clock.monotonic()
            await self.extend_for(min(deadlines.STALL, initial_seconds()))

    async def extend_for(self, seconds: float) -> None:
        """Extend the deadline for a step that begins now and may take `seconds`."""
        operation, now = self._work.operation, clock.now()
        if request_of(operation).is_scale_up:
            age = (now - operation.created_at).total_seconds()
            remaining = deadlines.extend_deadline(age, seconds, initial_seconds())
            await in_thread(admission.need_until, operation.id, now + timedelta(seconds=remaining))
