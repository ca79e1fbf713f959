"""Early end of an install: by `backend.cancel`, or because the worker shuts down.

Code in a thread checks its `Halt`; code in the event loop is cancelled. A step that cannot be interrupted is
waited for (`uninterruptible`, `wait_for_thread`), so that it does not continue while its caller cleans up.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from localai_cluster.kit.errors import ClusterError

T = TypeVar("T")


class Cancelled(ClusterError):
    """A controller has cancelled the operation."""

    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("cancelled")


class Halt(threading.Event):
    """An event that is set once, when an install must end.

    `cancelled` is True if the files of the install are not needed later.
    """

    cancelled = False

    def cancel(self) -> None:
        """Set the event and `cancelled`."""
        self.cancelled = True
        self.set()


class Command:
    """One running install or upgrade.

    `task` is the asyncio task that runs it; whoever starts the task sets it.
    """

    def __init__(self, op_id: str) -> None:
        self.op_id = op_id
        self.halt = Halt()
        self.key = ""
        """Key of the engine that it is starting, "" if none."""
        self.task: asyncio.Task[Any] | None = None
        self._is_interruptible = False

    def cancel(self) -> None:
        """End the command with Cancelled, unless the command succeeds first."""
        if not self.halt.cancelled:
            self.halt.cancel()
            if self._is_interruptible and self.task is not None:
                self.task.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Enter a block that `cancel` interrupts at once. Raise Cancelled."""
        self._raise_if_cancelled()
        self._is_interruptible = True
        try:
            yield
        except asyncio.CancelledError:
            if not self.halt.cancelled:
                raise
            clear_cancellation()
            raise Cancelled from None
        except ClusterError:
            # WorkCancelled, or an error that follows from a closed connection or a missing file.
            self._raise_if_cancelled()
            raise
        finally:
            self._is_interruptible = False

    @contextmanager
    def uninterruptible(self, key: str = "") -> Iterator[None]:
        """Enter a step inside `interruptible` that ends before a cancel takes effect.

        `key` is the process key of the engine that starts in this step. Raise Cancelled.
        """
        self._raise_if_cancelled()
        self._is_interruptible, self.key = False, key
        try:
            yield
        except ClusterError:
            self._raise_if_cancelled()
            raise
        finally:
            self._is_interruptible, self.key = True, ""
        self._raise_if_cancelled()

    def _raise_if_cancelled(self) -> None:
        if self.halt.cancelled:
            raise Cancelled


async def wait_for_thread(work: "asyncio.Future[T]") -> T:
    """Return the result of `work`, which runs in a thread.

    Even if cancelled, return only after the thread has ended, because the caller then closes a file that the
    thread uses.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            # `kit.cancellation` cancels repeatedly.
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # retrieved and dropped: the caller was cancelled
        raise


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run `call` in a thread. Even if cancelled, return only after the thread has ended."""
    return await wait_for_thread(asyncio.ensure_future(asyncio.to_thread(call, *arguments)))


def clear_cancellation() -> None:
    """Clear the cancellation of the current task, so that the task continues."""
    if task := asyncio.current_task():
        task.uncancel()
