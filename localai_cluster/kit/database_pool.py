"""The web process's own connections to PostgreSQL: async, autocommit, prepared statements.

They are separate from Django's. Each process has one pool, opened in the serving event loop, for the hot path
and the batched heartbeats. Durability is relaxed here: the next settlement of the `Picker` corrects a count
that a crashed server lost, so no request waits for a disk.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from localai_cluster.kit import conf
from localai_cluster.kit.errors import Unavailable

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Parameters = Mapping[str, Any]

_ReadOnly = psycopg.errors.ReadOnlySqlTransaction
UNREACHABLE_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError, _ReadOnly, PoolTimeout, OSError)
"""Exceptions of a statement that mean an unreachable database, not a wrong statement.

A server that only reads is a standby: after a failover the address may lead to it for some time.
"""

MAX_CONNECTIONS = 6
_MAX_IDLE_SECONDS = 15.0
"""Seconds after which the pool closes an unneeded connection: each one is a PostgreSQL process."""
_CONNECTION_WAIT_TIMEOUT = 5.0
ROUND_TRIP_TIMEOUT = 12.0
"""Time limit of a round trip in seconds. It exceeds the session's own limits: a server that is silent for
longer hangs or is unreachable.
"""
# Each statement is planned once: planning costs more than executing these statements. JIT is off for the
# same reason. A statement that waits longer than its limit is stuck behind a broken transaction.
_SESSION_OPTIONS = (
    "-c plan_cache_mode=force_generic_plan -c jit=off -c synchronous_commit=off"
    " -c statement_timeout=10s -c lock_timeout=8s -c idle_in_transaction_session_timeout=20s"
)


def conninfo(url: str) -> str:
    """Return the operator's connection string with this pool's session settings added."""
    parts = conninfo_to_dict(url)
    options = f"{parts.get('options') or ''} {_SESSION_OPTIONS}".strip()
    return make_conninfo(
        url,
        options=options,
        application_name="localai-cluster-web",
        connect_timeout=int(_CONNECTION_WAIT_TIMEOUT),
    )


class _TimeLimitedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A PostgreSQL connection whose round trips have a time limit."""

    async def wait(self, *arguments: Any, **options: Any) -> Any:
        """Run one round trip; on timeout raise OperationalError and close the connection."""
        try:
            async with asyncio.timeout(ROUND_TRIP_TIMEOUT):
                return await super().wait(*arguments, **options)
        except TimeoutError as error:
            raise psycopg.OperationalError(f"no answer within {ROUND_TRIP_TIMEOUT:.0f} s") from error


class Pool:
    """A pool of the connections of one process, on one event loop."""

    def __init__(self, url: str) -> None:
        self._conninfo = conninfo(url)
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._conninfo,
            min_size=1,
            max_size=MAX_CONNECTIONS,
            timeout=_CONNECTION_WAIT_TIMEOUT,
            max_idle=_MAX_IDLE_SECONDS,
            connection_class=_TimeLimitedConnection,
            kwargs={"autocommit": True, "prepare_threshold": 0},
            open=False,
        )

    async def open(self) -> None:
        """Start connecting without waiting, so that a web process can start before its database."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close(timeout=_CONNECTION_WAIT_TIMEOUT)

    async def check(self) -> None:
        """Replace the connections that failed while idle."""
        await self._pool.check()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Yield a connection of the pool. All are replaced if its server only reads."""
        async with self._pool.connection() as connection:
            try:
                yield connection
            except _ReadOnly:
                await self._pool.drain()
                raise

    async def fetch_rows(self, statement: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """Run one statement in its own transaction and return its rows."""
        async with self._connection() as connection:
            return await (await connection.execute(statement, parameters)).fetchall()

    async def run(self, statement: str, parameters: Parameters) -> int:
        """Run one statement in its own transaction and return the number of affected rows."""
        async with self._connection() as connection:
            return (await connection.execute(statement, parameters)).rowcount

    async def run_in_transaction(self, statements: list[tuple[str, Parameters]]) -> list[tuple[Any, ...]]:
        """Run statements in one transaction. Each one sees all rows that were committed before it began.

        Return the rows of the last statement, or none if it returns no rows.
        """
        async with self._connection() as connection, connection.transaction():
            for text, values in statements:
                cursor = await connection.execute(text, values)
            return await cursor.fetchall() if cursor.description else []


class DedicatedConnection:
    """One connection for one statement that runs repeatedly, never concurrently.

    A statement takes a third of the time that it takes in a pool. The connection is opened at the first use
    and again after an error.
    """

    def __init__(self, url: str) -> None:
        self._conninfo = conninfo(url)
        self._connection: Connection | None = None
        self._cursor: psycopg.AsyncRawCursor[tuple[Any, ...]] | None = None

    async def fetch_rows(self, statement: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """Run one statement with `$1` placeholders in its own transaction and return its rows.

        Parameters are strings, because the driver's own conversions cost more than the statement.
        """
        cursor = self._cursor or await self._connect()
        try:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()
        except (psycopg.Error, OSError):
            await self.close()
            raise

    async def _connect(self) -> "psycopg.AsyncRawCursor[tuple[Any, ...]]":
        self._connection = await _TimeLimitedConnection.connect(
            self._conninfo, autocommit=True, prepare_threshold=0
        )
        self._cursor = psycopg.AsyncRawCursor(self._connection)
        return self._cursor

    async def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            await connection.close()


_shared_pool: Pool | None = None


def shared() -> Pool:
    """Return the pool of this web process; raise Unavailable before it is opened."""
    if _shared_pool is None:
        raise Unavailable("the web process is not ready yet", retry_after=1)
    return _shared_pool


async def open_shared() -> Pool:
    """Open the pool of this web process on the running loop."""
    global _shared_pool
    pool = Pool(conf.cluster().database_url)
    await pool.open()
    _shared_pool = pool
    return pool


async def close_shared() -> None:
    """Close the pool of this web process."""
    global _shared_pool
    pool, _shared_pool = _shared_pool, None
    if pool is not None:
        await pool.close()
