"""How an install is ended before its time: by `backend.cancel`, or because the worker shuts down.

Code in a thread looks at its `Halt`; code in the event loop is cancelled. What is done in one piece (`whole`,
`settled`) is waited for, so that nothing goes on behind the back of one who cleans up.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from localai_cluster.errors import ClusterError

T = TypeVar("T")


class Cancelled(ClusterError):
    """A controller has cancelled the operation."""

    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("cancelled")


class Halt(threading.Event):
    """Set once, when an install is to end. `cancelled`: nothing of it is needed later."""

    cancelled = False

    def cancel(self) -> None:
        """Ends it for good."""
        self.cancelled = True
        self.set()


class Command:
    """One running install or upgrade, in one task (`task`, set by its owner)."""

    def __init__(self, op_id: str) -> None:
        self.op_id = op_id
        self.halt = Halt()
        self.key = ""
        """The engine that it starts at the moment."""
        self.task: asyncio.Task[Any] | None = None
        self._breakable = False

    def cancel(self) -> None:
        """Has it end with Cancelled, unless it succeeds first."""
        if not self.halt.cancelled:
            self.halt.cancel()
            if self._breakable and self.task is not None:
                self.task.cancel()

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """A cancel breaks off what runs inside. Cancelled."""
        self._check()
        self._breakable = True
        try:
            yield
        except asyncio.CancelledError:
            if not self.halt.cancelled:
                raise
            survive()
            raise Cancelled from None
        except ClusterError:
            # Stopped, or what a broken connection or a missing file made of it.
            self._check()
            raise
        finally:
            self._breakable = False

    @contextmanager
    def whole(self, key: str = "") -> Iterator[None]:
        """Inside `breakable`: a cancel waits for the end of this, which then has been in vain. Cancelled.

        `key` is the engine that starts inside.
        """
        self._check()
        self._breakable, self.key = False, key
        try:
            yield
        except ClusterError:
            self._check()
            raise
        finally:
            self._breakable, self.key = True, ""
        self._check()

    def _check(self) -> None:
        if self.halt.cancelled:
            raise Cancelled


async def settled(work: "asyncio.Future[T]") -> T:
    """The result of `work`, which runs in a thread: even if this task is cancelled, it returns after that."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """`asyncio.to_thread`, settled."""
    return await settled(asyncio.ensure_future(asyncio.to_thread(call, *arguments)))


def survive() -> None:
    """The present task goes on although it was cancelled."""
    if task := asyncio.current_task():
        task.uncancel()
