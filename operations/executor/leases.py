"""The thread that renews leases, with a database connection of its own.

Nothing else runs in this thread, so that leases are renewed while the shared threads are busy or blocked. A
call that hangs is aborted: its socket is shut down, so the thread gets an error and reconnects at the next
call.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
from django.db import close_old_connections, connection

from localai_cluster.kit import clock


class LeaseKeeper:
    """Renews the leases of one owner, one call at a time."""

    def __init__(self, owner: str, lease: float, renew: Callable[..., dict[UUID, int]]) -> None:
        self._owner, self._lease, self._renew_rows = owner, lease, renew
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leases")
        self._link: Any = None

    async def renew(self, fences: Mapping[UUID, int]) -> dict[UUID, int]:
        """Extend the leases on these ids; return the ids that the owner still holds, with their fences.

        Raises TimeoutError after half a lease.
        """
        call = asyncio.get_running_loop().run_in_executor(self._thread, self._renew, list(fences))
        try:
            async with asyncio.timeout(self._lease / 2):
                return await call
        except TimeoutError:
            self._cut()
            raise

    async def close(self) -> None:
        """Close the connection and end the thread."""
        self._cut()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease / 2):
                    await asyncio.get_running_loop().run_in_executor(self._thread, _disconnect)
        finally:
            # The wait above may have timed out before the thread was free, which cancels that call.
            self._thread.submit(_disconnect)
            self._thread.shutdown(wait=False)

    def _renew(self, ids: list[UUID]) -> dict[UUID, int]:
        close_old_connections()  # a broken or an old one; Django then opens a new one
        connection.ensure_connection()
        self._link = connection.connection
        try:
            return self._renew_rows(self._owner, ids, now=clock.now(), lease=self._lease)
        finally:
            self._link = None

    def _cut(self) -> None:
        link = self._link
        if link is None or link.closed:
            return
        with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(link.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)


def _disconnect() -> None:
    connection.close()
