"""Micro-batched picks and releases: the counts of this process, in memory and in the database.

One statement is under way at a time. Requests that arrive meanwhile wait, and the next statement serves all
of them. So a request costs at most one statement on the way in and one on the way out, and less under load.

`_held` is what runs in this process right now and is always right. The database follows it by deltas. When
the outcome of a statement is unknown (connection lost, this process taken for dead), the next step is a
settlement, which sets the rows to `_held` instead.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import orjson
import psycopg

from localai_cluster import __version__, clock, conf, disk
from localai_cluster.accounts.credentials import WrongKey
from localai_cluster.accounts.principals import Principal
from localai_cluster.errors import ClusterError, Unavailable
from localai_cluster.metrics import web as metrics
from nodes.models import PhaseReason
from nodes.registry import dialling
from nodes.replicas import statements, terminations
from nodes.replicas.prefix_statement import EXCHANGE_BY_PREFIX
from nodes.routing.confirmed_keys import ConfirmedKeys
from nodes.routing.pool import UNREACHABLE, DedicatedConnection, Parameters, Pool
from nodes.routing.request import InferenceRequest, PickWish, Replica

logger = logging.getLogger(__name__)

# A deadlock, or a process row that the liveness pass removed: the statement did nothing and may run again.
_REPEATABLE = (
    psycopg.errors.ForeignKeyViolation,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
_ATTEMPTS = 3
RELEASE_DELAY = 0.005
"""Seconds that a release waits for others to share its statement."""


Weights = Callable[[str], Iterable[tuple[tuple[UUID, int], float]]]
"""Tells of a model how much of prompts each replica, by node and index, is the home of (R3.12)."""


def no_weights(_: str) -> Iterable[tuple[tuple[UUID, int], float]]:
    """Prompts do not count."""
    return ()


class Picker:
    """Picks and releases of one web process; lives on one event loop."""

    def __init__(self, pool: Pool, connection: DedicatedConnection, weights: Weights = no_weights) -> None:
        self.process_id = uuid4()
        self.confirmed_keys = ConfirmedKeys()
        self._weights = weights
        self._pool = pool
        self._connection = connection
        self._identity = {
            "process": self.process_id,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "started": clock.now(),
            "version": __version__,
        }
        self._waiting: list[InferenceRequest] = []
        self._released: Counter[UUID] = Counter()
        self._held: Counter[UUID] = Counter()
        self._unsettled = False
        self._task: asyncio.Task[None] | None = None
        self._delayed: asyncio.TimerHandle | None = None

    async def acquire(self, request: InferenceRequest) -> Replica | None:
        """Picks a replica of the request's model and counts it in; None when no replica is loaded.

        The same statement confirms the request's API key and fills in its principal; raises WrongKey
        for a key that is not valid. Without a model it only does that. Raises Unavailable when the database
        is unreachable.
        """
        began, outcome, picked = clock.monotonic(), "failed", request.begin_pick()
        self._waiting.append(request)
        self._wake()
        try:
            await picked
            outcome = "picked" if request.replica else "none" if request.model else "confirmed"
        except WrongKey:
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = metrics.LEFT
            # It may arrive in the same turn of the loop as a replica, which nothing else would count out.
            replica, request.replica = request.replica, None
            if replica is not None:
                self.release(replica)
            raise
        finally:
            metrics.pick_ended(outcome, clock.monotonic() - began)
        return request.replica

    def release(self, replica: Replica) -> None:
        """Counts one request out. It never waits and never fails, so that every path can call it (R2.73)."""
        if self._held[replica.id] <= 1:
            del self._held[replica.id]
        else:
            self._held[replica.id] -= 1
        self._released[replica.id] += 1
        self._wake_soon()

    async def settle(self) -> None:
        """Creates or renews this process's row and sets its counts in the database to those in memory."""
        self._unsettled = True
        self._wake()
        await self.idle()
        if self._unsettled:
            raise Unavailable(disk.explained("the database is not reachable"), retry_after=2)

    async def lose(self, replica: Replica, *, strange: bool = False) -> bool:
        """Takes a replica out of the picks that did no work: the row that was picked, not one in its place.

        `strange`: its engine answers, but holds another model or none.
        """
        reason = PhaseReason.WRONG_MODEL if strange else PhaseReason.LOST
        return await terminations.lose(self._pool, replica.id, replica.address, reason=reason)

    async def renew(self) -> bool:
        """Says that this process lives; False when its row is gone."""
        return await self._pool.run(statements.RENEW, self._about()) == 1

    async def sign_off(self) -> None:
        """Releases everything and removes this process's row: a clean stop."""
        await self.idle()
        self._cancel_delayed()
        self._released.clear()
        await self._connection.close()
        about = {**self._about(), "ids": []}
        texts = (statements.LOCK_USED, statements.RELEASE_ALL, statements.DELETE_PROCESS)
        await self._pool.run_in_transaction([(text, about) for text in texts])

    async def idle(self) -> None:
        """Returns when no statement is under way."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def in_flight(self) -> int:
        """Requests that run in this process right now."""
        return self._held.total()

    def _about(self) -> Parameters:
        now = clock.now()
        gap = now - timedelta(seconds=conf.cluster().web_stale_after)
        return {**self._identity, "now": now, "gap": gap}

    def _wake_soon(self) -> None:
        if self._released and self._task is None and self._delayed is None:
            self._delayed = asyncio.get_running_loop().call_later(RELEASE_DELAY, self._wake)

    def _cancel_delayed(self) -> None:
        if self._delayed is not None:
            self._delayed.cancel()
            self._delayed = None

    def _wake(self) -> None:
        self._cancel_delayed()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._exchange()
            while self._waiting or self._unsettled:
                await self._exchange()
        except (*_REPEATABLE, *UNREACHABLE) as error:
            logger.warning("Cannot settle the counts of this process: %s", error)
            self._refuse(Unavailable(disk.explained("the database is not reachable"), retry_after=2))
        except Exception:
            logger.exception("Picking failed")
            self._unsettled = True
            self._refuse(ClusterError())
        finally:
            self._task = None
            self._wake_soon()

    def _refuse(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            _fail(request, error)

    async def _exchange(self) -> None:
        if self._unsettled:
            await self._settle()
        requests, self._waiting = [one for one in self._waiting if not one.picked.cancelled()], []
        released, self._released = self._released, Counter()
        if not requests and not released:
            return
        asks = _Asks(requests)
        document = _exchanged(requests, asks, released)
        statement = statements.EXCHANGE
        if asks.by_prefix:
            statement = EXCHANGE_BY_PREFIX
            document |= self._about_prefixes(asks)
        values = (str(self.process_id), clock.now().isoformat(), orjson.dumps(document).decode())
        try:
            rows = await self._connection.rows(statement, values)
        except (*_REPEATABLE, *UNREACHABLE) as error:
            # It is unknown whether the statement took effect: a settlement comes before the next exchange.
            self._unsettled = True
            self._waiting = [*self._retried(requests, error), *self._waiting]
        else:
            self._distribute(requests, asks, rows)

    def _about_prefixes(self, asks: "_Asks") -> dict[str, Any]:
        cluster = conf.cluster()
        models = dict.fromkeys(wish.model for wish in asks.by_prefix)
        return {
            "thresholds": {
                "match": cluster.prefix_match,
                "abs": cluster.prefix_balance_abs,
                "rel": cluster.prefix_balance_rel,
            },
            "weights": [
                {"model": model, "node": node, "index": index, "weight": weight}
                for model in models
                for (node, index), weight in self._weights(model)
            ],
        }

    def _retried(self, requests: list[InferenceRequest], error: Exception) -> list[InferenceRequest]:
        # After a lost connection there is exactly one more attempt: perhaps only that connection was dead.
        limit = _ATTEMPTS if isinstance(error, _REPEATABLE) else 2
        for request in requests:
            request.pick_attempts += 1
            if request.pick_attempts >= limit:
                _fail(request, Unavailable(disk.explained("the database is not reachable"), retry_after=2))
        if requests and requests[0].pick_attempts >= limit:
            logger.warning("Cannot pick replicas: %s", error)
        return [request for request in requests if not request.picked.done()]

    def _distribute(
        self, requests: list[InferenceRequest], asks: "_Asks", rows: list[tuple[Any, ...]]
    ) -> None:
        owners: dict[str, Principal] = {}
        replicas: dict[int, list[Replica]] = {}
        remembered: dict[int, bool | None] = {}
        for replica, node, name, text, number, flag, token, ask, index, *told in rows:
            if replica is None:
                owners[name] = Principal("admin" if flag else "user", text, user_id=number)
            else:
                self._held[replica] += number
                picked = Replica(replica, node, index, name, text, dialling.bearer(token, flag))
                replicas.setdefault(ask, []).extend([picked] * number)
                remembered[ask] = told[0] if told else None
        for request in requests:
            owner = owners.get(request.key_hash)
            if request.key_hash and owner is None:
                self.confirmed_keys.discard(request.key_hash)
                _fail(request, WrongKey())
                continue
            ask = next((ask for ask in asks.of(request) if replicas.get(ask)), None)
            request.remembered = remembered.get(ask) if ask is not None else None
            self._answer(request, owner, replicas[ask].pop() if ask is not None else None)

    def _answer(self, request: InferenceRequest, owner: Principal | None, replica: Replica | None) -> None:
        if request.picked.done():
            if replica is not None:
                self.release(replica)
            return
        if owner is not None:
            self.confirmed_keys.add(request.key_hash)
            request.principal, request.key_hash = owner, ""
        request.replica = replica
        request.picked.set_result(None)

    async def _settle(self) -> None:
        await self._pool.check()
        held, self._released = dict(self._held), Counter()
        about = {**self._about(), "ids": list(held), "counts": list(held.values())}
        texts = (statements.ANNOUNCE, statements.LOCK_USED, statements.SETTLE)
        await self._pool.run_in_transaction([(text, about) for text in texts])
        self._unsettled = False


def _fail(request: InferenceRequest, error: Exception) -> None:
    if not request.picked.done():
        request.picked.set_exception(error)


class _Asks:
    """The different wishes, numbered. Those with a share have a second number, below zero, which all share
    that differ in nothing but their prompts.
    """

    def __init__(self, requests: Iterable[InferenceRequest]) -> None:
        wishes = dict.fromkeys(request.wish for request in requests if request.model)
        self.by_prefix = [wish for wish in wishes if wish.share is not None]
        plainly = dict.fromkeys(wish.whichever for wish in self.by_prefix)
        self._numbers = {wish: number for number, wish in enumerate(wishes)}
        self._plainly = {wish: -1 - number for number, wish in enumerate(plainly)}

    def number(self, wish: PickWish) -> int:
        """Its own."""
        return self._numbers[wish]

    def plainly(self, wish: PickWish) -> int | None:
        """The one for all such prompts; None if it is not to go by its prompt."""
        return None if wish.share is None else self._plainly[wish.whichever]

    def of(self, request: InferenceRequest) -> tuple[int, ...]:
        """The numbers under which there may be a replica for it."""
        if not request.model:
            return ()
        wish = request.wish
        own, plainly = self._numbers[wish], self.plainly(wish)
        return (own,) if plainly is None else (own, plainly)


def _exchanged(requests: Iterable[InferenceRequest], asks: _Asks, released: Counter[UUID]) -> dict[str, Any]:
    picks = Counter((request.wish, request.key_hash) for request in requests if request.model)
    return {
        "keys": list({request.key_hash for request in requests if request.key_hash}),
        "picks": [_pick(wish, asks) | {"key": key, "n": n} for (wish, key), n in picks.items()],
        "releases": [{"id": replica, "n": n} for replica, n in released.items()],
    }


def _pick(wish: PickWish, asks: _Asks) -> dict[str, Any]:
    pick = {
        "ask": asks.number(wish),
        "model": wish.model,
        "nodes": None if wish.candidates is None else list(wish.candidates),
        "node": wish.preferred and wish.preferred[0],
        "index": wish.preferred and wish.preferred[1],
    }
    return pick if wish.share is None else pick | {"share": wish.share, "plainly": asks.plainly(wish)}
