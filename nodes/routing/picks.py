"""Micro-batched picks and releases: the counts of this process, in memory and in the database.

One statement is under way at a time. What is asked meanwhile gathers, and the next statement serves it
all, so a request costs at most one statement on the way in and one on the way out, and less the higher the
load.

`_held` is what runs in this process right now and is always right. The database follows it by deltas; when
the outcome of a statement is unknown (connection lost, this process taken for dead), the next step is a
settlement that sets the rows to `_held` instead.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import orjson
import psycopg

from localai_cluster import clock, conf
from localai_cluster.errors import ClusterError, NotAuthenticated, Unavailable
from nodes.replicas import retire, statements
from nodes.routing.pool import UNREACHABLE, Line, Parameters, Pool

logger = logging.getLogger(__name__)

# Deadlock and a process row that the liveness pass removed: the statement did nothing and may be sent again.
_REPEATABLE = (
    psycopg.errors.ForeignKeyViolation,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
_ATTEMPTS = 3
LINGER = 0.005
"""Seconds that a release waits for company."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A picked replica; it is counted as in flight until it is given back."""

    id: UUID
    node_id: UUID
    model: str
    address: str


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of a valid API key."""

    user_id: int
    name: str
    is_staff: bool


@dataclass(slots=True)
class _Ask:
    model: str
    key_hash: str
    answer: "asyncio.Future[tuple[KeyOwner | None, Replica | None]]"
    attempts: int = 0


class Picker:
    """Picks and releases of one web process; lives on one event loop."""

    def __init__(self, pool: Pool, line: Line) -> None:
        self.process_id = uuid4()
        self._pool = pool
        self._line = line
        self._identity = {
            "process": self.process_id,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "started": clock.now(),
        }
        self._asks: list[_Ask] = []
        self._given: Counter[UUID] = Counter()
        self._held: Counter[UUID] = Counter()
        self._unsettled = False
        self._worker: asyncio.Task[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None

    async def take(self, model: str, key_hash: str = "") -> tuple[KeyOwner | None, Replica | None]:
        """The replica for one request of `model`, counted in, or None when no replica is loaded.

        With `key_hash` the same statement says whose API key it is; raises NotAuthenticated when nobody's.
        An empty `model` asks for the caller only. Raises Unavailable when the database is away.
        """
        ask = _Ask(model, key_hash, asyncio.get_running_loop().create_future())
        self._asks.append(ask)
        self._wake()
        try:
            return await ask.answer
        except asyncio.CancelledError:
            self._take_back(ask)
            raise

    def give_back(self, replica: Replica) -> None:
        """Counts one request out again. Never waits and never fails, so that every path can afford it
        (R2.73)."""
        if self._held[replica.id] <= 1:
            del self._held[replica.id]
        else:
            self._held[replica.id] -= 1
        self._given[replica.id] += 1
        self._linger()

    async def settle(self) -> None:
        """Creates or renews this process's row and makes its counts in the database what they are here."""
        self._unsettled = True
        self._wake()
        await self.idle()
        if self._unsettled:
            raise Unavailable("the database is not reachable", retry_after=2)

    async def remove(self, replica: Replica) -> bool:
        """Takes a dead replica out of service: exactly the row that was picked, not one put in its place
        since."""
        return await retire.retire_dead(self._pool, replica.id, replica.address)

    async def seen(self) -> bool:
        """Says that this process lives; False when its row is gone."""
        return await self._pool.run(statements.SEEN, self._about()) == 1

    async def leave(self) -> None:
        """Gives everything back and removes this process's row: a clean stop."""
        await self.idle()
        self._stop_lingering()
        self._given.clear()
        await self._line.close()
        about = {**self._about(), "ids": []}
        texts = (statements.LOCK_USED, statements.TAKE_BACK, statements.FORGET)
        await self._pool.run_together([(text, about) for text in texts])

    async def idle(self) -> None:
        """Returns when no statement is under way."""
        while self._worker is not None:
            await asyncio.wait([self._worker])

    def in_flight(self) -> int:
        """Requests that this process carries right now."""
        return self._held.total()

    def _about(self) -> Parameters:
        now = clock.now()
        gap = now - timedelta(seconds=conf.cluster().web_stale_after)
        return {**self._identity, "now": now, "gap": gap}

    def _take_back(self, ask: _Ask) -> None:
        # A cancellation that meets the answer in one turn of the loop wins: nobody else would count it out.
        if ask.answer.done() and not ask.answer.cancelled() and ask.answer.exception() is None:
            _, replica = ask.answer.result()
            if replica is not None:
                self.give_back(replica)

    def _linger(self) -> None:
        if self._given and self._worker is None and self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER, self._wake)

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def _wake(self) -> None:
        self._stop_lingering()
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            await self._exchange()
            while self._asks or self._unsettled:
                await self._exchange()
        except (*_REPEATABLE, *UNREACHABLE) as error:
            logger.warning("Cannot settle the counts of this process: %s", error)
            self._refuse(Unavailable("the database is not reachable", retry_after=2))
        except Exception:
            logger.exception("Picking failed")
            self._unsettled = True
            self._refuse(ClusterError())
        finally:
            self._worker = None
            self._linger()

    def _refuse(self, error: Exception) -> None:
        asks, self._asks = self._asks, []
        for ask in asks:
            _fail(ask, error)

    async def _exchange(self) -> None:
        if self._unsettled:
            await self._settle()
        asks, self._asks = [ask for ask in self._asks if not ask.answer.cancelled()], []
        gives, self._given = self._given, Counter()
        if not asks and not gives:
            return
        values = (str(self.process_id), clock.now().isoformat(), _wants(asks, gives))
        try:
            rows = await self._line.rows(statements.EXCHANGE, values)
        except (*_REPEATABLE, *UNREACHABLE) as error:
            # Whether it was carried out is unknown: a settlement comes before the next exchange.
            self._unsettled = True
            self._asks = [*self._again(asks, error), *self._asks]
        else:
            self._deal(asks, rows)

    def _again(self, asks: list[_Ask], error: Exception) -> list[_Ask]:
        # A lost connection is worth exactly one more look: the pool may only have held a dead one.
        limit = _ATTEMPTS if isinstance(error, _REPEATABLE) else 2
        for ask in asks:
            ask.attempts += 1
            if ask.attempts >= limit:
                _fail(ask, Unavailable("the database is not reachable", retry_after=2))
        if asks and asks[0].attempts >= limit:
            logger.warning("Cannot pick replicas: %s", error)
        return [ask for ask in asks if not ask.answer.done()]

    def _deal(self, asks: list[_Ask], rows: list[tuple[Any, ...]]) -> None:
        callers: dict[str, KeyOwner] = {}
        replicas: dict[str, list[Replica]] = {}
        for replica, node, name, text, number, staff in rows:
            if replica is None:
                callers[name] = KeyOwner(number, text, staff)
            else:
                self._held[replica] += number
                replicas.setdefault(name, []).extend([Replica(replica, node, name, text)] * number)
        for ask in asks:
            caller = callers.get(ask.key_hash)
            if ask.key_hash and caller is None:
                _fail(ask, NotAuthenticated("this API key is not valid"))
                continue
            waiting = replicas.get(ask.model)
            self._answer(ask, caller, waiting.pop() if waiting else None)

    def _answer(self, ask: _Ask, caller: KeyOwner | None, replica: Replica | None) -> None:
        if not ask.answer.done():
            ask.answer.set_result((caller, replica))
        elif replica is not None:
            self.give_back(replica)

    async def _settle(self) -> None:
        await self._pool.heal()
        held, self._given = dict(self._held), Counter()
        about = {**self._about(), "ids": list(held), "counts": list(held.values())}
        texts = (statements.ANNOUNCE, statements.LOCK_USED, statements.SETTLE)
        await self._pool.run_together([(text, about) for text in texts])
        self._unsettled = False


def _fail(ask: _Ask, error: Exception) -> None:
    if not ask.answer.done():
        ask.answer.set_exception(error)


def _wants(asks: Iterable[_Ask], gives: Counter[UUID]) -> str:
    asked = Counter((ask.model, ask.key_hash) for ask in asks if ask.model)
    wants = {
        "keys": list({ask.key_hash for ask in asks if ask.key_hash}),
        "asks": [{"model": model, "owner": owner, "n": n} for (model, owner), n in asked.items()],
        "gives": [{"id": replica, "n": n} for replica, n in gives.items()],
    }
    return orjson.dumps(wants).decode()
