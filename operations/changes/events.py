"""Publishing of changed operations: never before the commit, and never as the only copy of a change.

A change causes two notifications. `notify` adds a PostgreSQL NOTIFY to the transaction itself; controllers
and waiting requests LISTEN (`listen`). `publish` sends the change to the channel layer after the commit, for
browsers. Both may be lost: a listener reads the rows, and also polls them from time to time.

`emit` gives a change of operations the next number. The counter's row is locked from taking a number until
the commit. So `emit` is the last call of a transaction, and taking the number is its last statement: no
transaction may wait for a row while it holds the counter.

This code runs in threads without an event loop, in forked task workers and in async processes, so each
process accesses the channel layer through one bridge: a daemon thread with its own loop.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg
from channels.layers import get_channel_layer
from django.db import connection, transaction
from psycopg import sql
from psycopg.conninfo import make_conninfo

from operations import targets
from operations.changes import feed
from operations.models import Operation, OperationTarget

log = logging.getLogger(__name__)

OPERATIONS = "cluster_operations"
"""NOTIFY channel of changed operations; the payload is `<operation id> <status>`."""
NODES = "cluster_nodes"
"""NOTIFY channel of changed nodes; the payload is `<node id>`."""
GROUP = "operations"
"""Channel-layer group of all watchers of operations."""

MAX_CHANGES_PER_MESSAGE = 100
"""Maximum number of changes in one message of the channel layer; many messages are slower than long ones."""
_RECONNECT_PAUSE = 1.0
_TIMER_INTERVAL = 60.0
"""Seconds between two wake-ups of the driver while a connection waits; its default is 0.1 s, for Ctrl-C."""


def notify(channel: str, *payloads: str) -> None:
    """Add a NOTIFY for each payload to the caller's transaction; PostgreSQL sends them at its commit."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload", [channel, list(payloads)]
        )


def conninfo() -> str:
    """Return the connection string of Django's database, for connections outside the ORM."""
    settings = connection.settings_dict
    options = {k: v for k, v in settings["OPTIONS"].items() if k != "pool"}
    parameters = {
        "dbname": settings["NAME"],
        "user": settings["USER"],
        "password": settings["PASSWORD"],
        "host": settings["HOST"],
        "port": settings["PORT"],
    }
    return make_conninfo(**options, **{key: value for key, value in parameters.items() if value})


class _Listener(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection that sleeps until the server sends something."""

    async def wait(self, *arguments: Any, **options: Any) -> Any:
        """Run one round trip, or wait for notifications."""
        return await super().wait(*arguments, **{"interval": _TIMER_INTERVAL, **options})


async def listen(*channels: str) -> AsyncIterator[tuple[str, str]]:
    """Yield (channel, payload) of each NOTIFY, without end.

    Yields ("", "") after each (re)connect, because notifications may have been lost.
    """
    failing = False
    while True:
        try:
            async with await _Listener.connect(conninfo(), autocommit=True) as link:
                for channel in channels:
                    await link.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                failing = False
                yield "", ""
                async for note in link.notifies():
                    yield note.channel, note.payload
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if not failing:
                log.warning("listening interrupted, trying every %.0f s: %s", _RECONNECT_PAUSE, error)
            failing = True
            await asyncio.sleep(_RECONNECT_PAUSE)


class _Bridge:
    """An event loop in a daemon thread; a forked process creates its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="event-bridge", daemon=True).start()
            asyncio.run_coroutine_threadsafe(self._send(message), self._loop)

    @staticmethod
    async def _send(message: Mapping[str, Any]) -> None:
        try:
            layer = get_channel_layer()
            if layer is not None:
                async with asyncio.timeout(5):
                    await layer.group_send(GROUP, dict(message))
        except Exception as error:
            # A lost message costs a browser a few seconds, never a change: it re-reads the rows.
            log.warning("an operation's change did not reach the channel layer: %r", error)


_bridge = _Bridge()


def publish(operations: Sequence[Mapping[str, Any]]) -> None:
    """Send committed changes to all watching browsers, each with its number `seq`.

    Does not wait for the result.
    """
    for first in range(0, len(operations), MAX_CHANGES_PER_MESSAGE):
        batch = [dict(operation) for operation in operations[first : first + MAX_CHANGES_PER_MESSAGE]]
        _bridge.submit({"type": "operations.changed", "operations": batch})


def emit(
    operations: Iterable[Operation],
    parts: Mapping[UUID, Sequence[OperationTarget]] | None = None,
    moved: Iterable[OperationTarget] | None = None,
) -> None:
    """Number the changes of these saved operations, and publish them at the commit.

    `parts` are the operations' targets if the caller has read them, and `moved` the changed targets.
    """
    rows = list(operations)
    if not rows:
        return
    parts_by_id = targets.of(rows) if parts is None else parts
    notify(OPERATIONS, *(f"{operation.id} {operation.status}" for operation in rows))
    moved_by_id: dict[UUID, list[OperationTarget]] = {}
    for part in moved or ():
        moved_by_id.setdefault(part.operation_id, []).append(part)
    changes = [
        feed.change_of(
            operation,
            parts_by_id.get(operation.id, ()),
            None if moved is None else moved_by_id.get(operation.id, ()),
        )
        for operation in rows
    ]
    _assign_numbers(rows)
    for operation, change in zip(rows, changes, strict=True):
        change["seq"] = operation.seq
    transaction.on_commit(lambda: publish(changes))


def _assign_numbers(rows: list[Operation]) -> None:
    """Assign the next numbers to the rows in their order; the counter's row stays locked until the commit."""
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH taken AS (INSERT INTO operation_sequence AS s (id, value) VALUES (1, %s)"
            " ON CONFLICT (id) DO UPDATE SET value = s.value + EXCLUDED.value RETURNING value)"
            " UPDATE operations SET seq = taken.value - %s + row.number"
            " FROM taken, unnest(%s::uuid[]) WITH ORDINALITY AS row (id, number)"
            " WHERE operations.id = row.id RETURNING operations.id, operations.seq",
            [len(rows), len(rows), [operation.id for operation in rows]],
        )
        numbers = dict(cursor.fetchall())
    for operation in rows:
        operation.seq = numbers[operation.id]
