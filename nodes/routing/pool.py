"""The web process's own connections to PostgreSQL, beside Django's: async, autocommit, prepared statements.

One pool a process, opened in the loop that serves, for the hot path and the batched heartbeats. Durability is
relaxed here: a count lost with a crashed server is put right by the next `Picker` settlement, so no request
waits for a disk.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from localai_cluster import conf
from localai_cluster.errors import Unavailable

logger = logging.getLogger(__name__)
logging.getLogger("psycopg.pool").setLevel(logging.ERROR)

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Parameters = Mapping[str, Any]

UNREACHABLE = (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, OSError)
"""What a statement raises when the database is away rather than the statement wrong."""

MAX_CONNECTIONS = 6
_IDLE_SECONDS = 15.0
"""The pool closes one unneeded connection in this time: each is a process of PostgreSQL's."""
_WAIT_SECONDS = 5.0
ANSWER_SECONDS = 12.0
"""Longer than the session's own limits: who has said nothing by then hangs, or is cut off from us."""
# One plan a statement for good: planning anew costs more than these statements do. No compilation for the
# same reason. A statement that waits longer than its limit is stuck behind somebody's broken transaction.
_SESSION = (
    "-c plan_cache_mode=force_generic_plan -c jit=off -c synchronous_commit=off"
    " -c statement_timeout=10s -c lock_timeout=8s -c idle_in_transaction_session_timeout=20s"
)


def conninfo(url: str) -> str:
    """The operator's connection string with this pool's session settings added."""
    parts = conninfo_to_dict(url)
    options = f"{parts.get('options') or ''} {_SESSION}".strip()
    return make_conninfo(
        url, options=options, application_name="localai-cluster-web", connect_timeout=int(_WAIT_SECONDS)
    )


class _Bounded(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection on which no round trip waits for ever."""

    async def wait(self, *arguments: Any, **options: Any) -> Any:
        """What every round trip goes through; raises OperationalError, and is closed, when nothing comes."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await super().wait(*arguments, **options)
        except TimeoutError as error:
            raise psycopg.OperationalError(f"no answer within {ANSWER_SECONDS:.0f} s") from error


class Pool:
    """Connections of one process and one event loop."""

    def __init__(self, url: str) -> None:
        self._conninfo = conninfo(url)
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._conninfo,
            min_size=1,
            max_size=MAX_CONNECTIONS,
            timeout=_WAIT_SECONDS,
            max_idle=_IDLE_SECONDS,
            connection_class=_Bounded,
            kwargs={"autocommit": True, "prepare_threshold": 0},
            open=False,
        )

    async def open(self) -> None:
        """Starts connecting; does not wait, so that a web process starts while its database is still away."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        """Closes every connection."""
        await self._pool.close(timeout=_WAIT_SECONDS)

    async def heal(self) -> None:
        """Replaces the connections that died while nobody used them."""
        await self._pool.check()

    async def rows(self, statement: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """Runs one statement in its own transaction and gives its rows."""
        async with self._pool.connection() as connection:
            return await (await connection.execute(statement, parameters)).fetchall()

    async def run(self, statement: str, parameters: Parameters) -> int:
        """Runs one statement in its own transaction and gives the number of rows it touched."""
        async with self._pool.connection() as connection:
            return (await connection.execute(statement, parameters)).rowcount

    async def run_together(self, statements: list[tuple[str, Parameters]]) -> list[tuple[Any, ...]]:
        """Runs statements in one transaction, each seeing what others committed before it began.

        Gives the rows of the last one, if it has any.
        """
        async with self._pool.connection() as connection, connection.transaction():
            for text, values in statements:
                cursor = await connection.execute(text, values)
            return await cursor.fetchall() if cursor.description else []


class Line:
    """One connection kept for one kind of statement, which is sent again and again, never two at a time.

    A third of what the same costs through a pool. It connects when it is used and after it was lost.
    """

    def __init__(self, url: str) -> None:
        self._conninfo = conninfo(url)
        self._connection: Connection | None = None
        self._cursor: psycopg.AsyncRawCursor[tuple[Any, ...]] | None = None

    async def rows(self, statement: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """Runs one statement with `$1` marks in its own transaction and gives its rows.

        Parameters are texts, because the driver's own conversions cost more than the statement.
        """
        cursor = self._cursor or await self._connect()
        try:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()
        except UNREACHABLE:
            await self.close()
            raise

    async def _connect(self) -> "psycopg.AsyncRawCursor[tuple[Any, ...]]":
        self._connection = await _Bounded.connect(self._conninfo, autocommit=True, prepare_threshold=0)
        self._cursor = psycopg.AsyncRawCursor(self._connection)
        return self._cursor

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            await connection.close()


_shared: Pool | None = None


def shared() -> Pool:
    """The pool of this web process; raises Unavailable before it is opened."""
    if _shared is None:
        raise Unavailable("the web process is not ready yet", retry_after=1)
    return _shared


async def open_shared() -> Pool:
    """Opens the pool of this web process on the running loop."""
    global _shared
    pool = Pool(conf.cluster().database_url)
    await pool.open()
    _shared = pool
    return pool


async def close_shared() -> None:
    """Closes it again."""
    global _shared
    pool, _shared = _shared, None
    if pool is not None:
        await pool.close()
