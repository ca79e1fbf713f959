"""The argument of an operation's handler, and the exceptions that the handler may raise."""

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
    """Ends the attempt and requeues the operation: retry in `seconds`, because of `reason`.

    `waiting` means that it waits for a node: a change of a node that could take it ends the wait early, and
    the attempt does not count. Otherwise the pause is a back-off, which is never cut short.
    """

    def __init__(
        self, reason: str, *, seconds: float, waiting: bool = False, payload: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.seconds, self.waiting, self.payload = reason, seconds, waiting, payload


class Abandoned(Exception):
    """Ends the operation as cancelled with this reason, because no request waits for the outcome any more."""


@dataclass(frozen=True)
class Work:
    """Argument of a handler: the claimed operation and two ways to report. Every report is fenced."""

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
        """Report the attempt's next step; raise LeaseLost if the attempt has lost the operation."""
        self.recorder.add(self.attempt, tick)
        await in_thread(lease.confirm, *self.attempt)

    def progress(self, tick: Tick) -> None:
        """Report progress, at any rate: the next batch writes the latest figures.

        The executor cancels an attempt that has lost its operation.
        """
        self.recorder.add(self.attempt, tick)


Handler = Callable[[Work], Awaitable[Mapping[str, Any] | None]]


def retry_delay(attempts: int) -> float:
    """Return the seconds before the next attempt after `attempts` that ended early: 1, 2, 4 … 30."""
    return float(min(2.0 ** min(attempts, 10), _RETRY_CAP))
