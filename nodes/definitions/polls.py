"""A read that may hang: it runs on a thread of its own, and all callers share it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from localai_cluster.kit import untrusted


class Poll:
    """A function that may hang, run on its own thread, one call at a time. The function must not raise."""

    def __init__(self, read: Callable[[], None], monotonic: Callable[[], float], limit: float) -> None:
        self._read, self._monotonic, self._limit = read, monotonic, limit
        self._lock = threading.Lock()
        self._call: Future[None] | None = None
        self._began_at = 0.0
        self._read_at = float("-inf")
        self._changes = self._changes_read = 0
        """Number of announced changes, and how many of them the last call has read."""

    def announce_change(self) -> None:
        """Make the next `wait` call the function, even if a call has already begun."""
        with self._lock:
            self._changes += 1

    def begin(self, interval: float) -> "Future[None] | None":
        """Return the running call or begin a new one; None if the last call is recent enough."""
        with self._lock:
            now = self._monotonic()
            if now - self._read_at < interval and self._changes_read == self._changes:
                return None
            if self._call is None:
                self._began_at = now
                self._call = untrusted.start_daemon_thread(self._run, now, self._changes)
            return self._call

    async def request_call(self, interval: float) -> None:
        """Make the next `wait` call the function `interval` seconds after its last call; callers share it."""
        latest = self._began_at
        await asyncio.sleep(max(latest + interval - self._monotonic(), 0))
        if self._began_at == latest:
            self.announce_change()

    def has_changes(self) -> bool:
        """Return True if a change was announced and no call has begun since."""
        with self._lock:
            return self._changes_read != self._changes

    def is_overdue(self) -> bool:
        """Return True if the running call has exceeded its limit."""
        with self._lock:
            return self._call is not None and self._monotonic() - self._began_at > self._limit

    async def wait(self, interval: float) -> bool:
        """Call the function unless its last call is recent; return False if the call takes too long."""
        return await self.finish(self.begin(interval))

    async def finish(self, call: "Future[None] | None") -> bool:
        """Wait for the call and, if a change was announced after it had begun, for another call."""
        changes = self._changes
        while call is not None:
            limit = max(self._began_at + self._limit - self._monotonic(), 0)
            if not await untrusted.wait_until_done(call, timeout=limit):
                return False
            call = None if self._changes_read >= changes else self.begin(0.0)
        return True

    def _run(self, call: "Future[None]", began_at: float, changes: int) -> None:
        self._read()
        with self._lock:
            self._read_at, self._changes_read, self._call = began_at, changes, None
        call.set_result(None)
