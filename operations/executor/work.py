"""What a handler of operations gets and may raise."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from channels.db import database_sync_to_async

from operations.executor.recorder import Recorder
from operations.ledger import lease
from operations.ledger.progress import Attempt, Tick
from operations.models import Operation

P = ParamSpec("P")


R = TypeVar("R")


_RETRY_CAP = 30.0


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run synchronous database code in a worker thread, with fresh connections."""
    call = database_sync_to_async(function, thread_sensitive=False)
    result: R = await call(*args, **kwargs)
    return result


class Postpone(Exception):
    """The attempt ends here, the operation does not: look again in `seconds`, because of `reason`.

    `waiting` means that it waits for a node: a change of one that could take it ends the wait early, and the
    attempt does not count. Without it the pause is a back-off, which nothing cuts short.
    """

    def __init__(
        self, reason: str, *, seconds: float, waiting: bool = False, payload: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.seconds, self.waiting, self.payload = reason, seconds, waiting, payload


class Abandoned(Exception):
    """No request waits for the outcome any more; the operation ends as cancelled with this reason."""


@dataclass(frozen=True)
class Work:
    """What a handler gets: the claimed operation and two ways to report. Every report is fenced."""

    operation: Operation
    recorder: Recorder

    @property
    def id(self) -> UUID:
        """The operation's id."""
        return self.operation.id

    @property
    def attempt(self) -> Attempt:
        """Id and fence."""
        return self.id, self.operation.fence

    async def report(self, tick: Tick) -> None:
        """Says what the attempt does next; raises LeaseLost when the operation is no longer its own."""
        self.recorder.add(self.attempt, tick)
        await in_thread(lease.confirm, *self.attempt)

    def progress(self, tick: Tick) -> None:
        """Says how far it is, as often as it likes: the next batch writes the latest figures.

        The executor ends an attempt that has lost its operation.
        """
        self.recorder.add(self.attempt, tick)


Handler = Callable[[Work], Awaitable[Mapping[str, Any] | None]]


def retry_delay(attempts: int) -> float:
    """Seconds before the next attempt after `attempts` that ended early: 1, 2, 4 … 30."""
    return float(min(2.0 ** min(attempts, 10), _RETRY_CAP))
