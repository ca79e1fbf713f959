"""Micro-batched picks and releases: this process's in-flight counts, in memory and in the database.

One statement runs at a time. Requests that arrive meanwhile wait, and the next statement serves all of them.
So a request costs at most one statement for its pick and one for its release, and less under load.

`_held` counts the requests that run in this process now and is always exact. The counts in the database are
updated by differences. When the outcome of a statement is unknown (connection lost, this process removed as
dead), the next step is a settlement, which sets the rows to `_held` instead. `ProcessHeartbeat` keeps the
process's row.
"""

import asyncio
import contextlib
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
from django.db import Error as DatabaseError

from localai_cluster import __version__
from localai_cluster.accounts.principals import Principal, WrongKey
from localai_cluster.kit import clock, conf, outage
from localai_cluster.kit.database_pool import UNREACHABLE_ERRORS, DedicatedConnection, Parameters, Pool
from localai_cluster.kit.errors import ClusterError, Unavailable
from localai_cluster.metrics import web as metrics
from nodes.figures import store as figures
from nodes.gateway.request import InferenceRequest, PickRequest, Replica
from nodes.models import PhaseReason
from nodes.registry import dial_targets
from nodes.replicas import statements, terminations

logger = logging.getLogger(__name__)

CONFIRMATION_SECONDS = 60.0
"""Seconds for which a confirmed key counts as confirmed."""
MAX_CONFIRMED_KEYS = 10_000
"""Maximum number of keys in `ConfirmedKeys`; beyond it the set is cleared."""


class ConfirmedKeys:
    """API keys that the database confirmed recently, with the times of confirmation.

    The set does not authenticate. It only decides how much of a body is read before the statement that picks
    a replica checks the key again. A change of a key or user clears the set (NOTIFY). After a lost NOTIFY the
    process only reads the body of a request with a revoked key. Not thread-safe: used on one event loop.
    """

    def __init__(self) -> None:
        self._confirmed_at: dict[str, float] = {}

    def __contains__(self, key_hash: str) -> bool:
        confirmed_at = self._confirmed_at.get(key_hash)
        return confirmed_at is not None and clock.monotonic() - confirmed_at < CONFIRMATION_SECONDS

    def add(self, key_hash: str) -> None:
        """Record that the key was valid just now."""
        if len(self._confirmed_at) >= MAX_CONFIRMED_KEYS and key_hash not in self._confirmed_at:
            self._confirmed_at.clear()
        self._confirmed_at[key_hash] = clock.monotonic()

    def discard(self, key_hash: str) -> None:
        """Remove a key that is not valid."""
        self._confirmed_at.pop(key_hash, None)

    def clear(self) -> None:
        """Remove all keys."""
        self._confirmed_at.clear()


# Errors after which a statement may be retried, because it had no effect: a deadlock, or a process row that
# the liveness pass removed.
_RETRYABLE_ERRORS = (
    psycopg.errors.ForeignKeyViolation,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
_STATEMENT_ATTEMPTS = 3
RELEASE_DELAY_SECONDS = 0.005
"""Seconds for which a release waits for more releases to share one statement."""
MIN_CROWDED_PICKS = 4
"""Number of picks in one statement after which the next statement waits for more picks."""
CROWD_DELAY_SECONDS = 0.003
"""Seconds for which a statement waits for more picks if there are many."""


PrefixWeights = Callable[[str], Iterable[tuple[tuple[UUID, int], float]]]
"""Returns the prefix weight of each replica of a model, with its node and index (R3.12)."""


def no_weights(_: str) -> Iterable[tuple[tuple[UUID, int], float]]:
    """Return no weights, so that picks ignore prefixes."""
    return ()


class _StatementBatch:
    """The requests that one SQL statement serves: replicas to pick, and finished requests to release.

    The statement reads them as one JSON document. There `ask` numbers the distinct pick requests from 0. A
    scope is a model with its allowed nodes, numbered from -1 downwards: where requests do not follow a cached
    prefix, the statement distributes all picks of a scope together.
    """

    def __init__(self, requests: list[InferenceRequest], released: Counter[UUID]) -> None:
        self.requests = requests
        self._released = released
        self._asks: dict[PickRequest, int] = {}
        self._scopes: dict[tuple[str, frozenset[UUID] | None], int] = {}
        self._picks: Counter[tuple[int, str]] = Counter()
        self.numbers: list[tuple[int, ...]] = []
        """For each request, the numbers under which the result may have its replica."""
        for request in requests:
            if not request.model:
                self.numbers.append(())
                continue
            within, ratio = (request.model, request.candidates), request.cached_ratio
            scope = self._scopes.setdefault(within, -1 - len(self._scopes))
            pick_request = PickRequest(*within, request.preferred, ratio, scope)
            ask = self._asks.setdefault(pick_request, len(self._asks))
            self._picks[ask, request.key_hash] += 1
            self.numbers.append((ask,) if ratio is None else (ask, scope))

    def document(self, weights: PrefixWeights) -> dict[str, Any]:
        """Return the document for the statement, with prefix weights if a pick has a prompt."""
        pick_requests = list(self._asks)
        document = {
            "keys": list({request.key_hash for request in self.requests if request.key_hash}),
            "picks": [
                _pick_document(pick_requests[ask]) | {"ask": ask, "key": key, "n": n}
                for (ask, key), n in self._picks.items()
            ],
            "releases": [{"id": replica, "n": n} for replica, n in self._released.items()],
        }
        models = {ask.model for ask in pick_requests if ask.cached_ratio is not None}
        if not models:
            return document
        cluster = conf.cluster()
        return document | {
            "thresholds": {
                "match": cluster.prefix_match,
                "abs": cluster.prefix_balance_abs,
                "rel": cluster.prefix_balance_rel,
            },
            "weights": {
                model: {f"{node}/{index}": weight for (node, index), weight in weights(model)}
                for model in models
            },
        }


def _pick_document(pick_request: PickRequest) -> dict[str, Any]:
    return {
        "scope": pick_request.scope,
        "model": pick_request.model,
        "nodes": None if pick_request.candidates is None else sorted(pick_request.candidates),
        "node": pick_request.preferred and pick_request.preferred[0],
        "index": pick_request.preferred and pick_request.preferred[1],
        "ratio": pick_request.cached_ratio,
    }


class Picker:
    """Picks and releases replicas for one web process. Bound to one event loop."""

    def __init__(
        self, pool: Pool, connection: DedicatedConnection, weights: PrefixWeights = no_weights
    ) -> None:
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
        """Pick a replica of the request's model and count the request. Return None if no replica is loaded.

        The same statement confirms the request's API key and sets its principal. For a request without a
        model it only confirms the key. Raise WrongKey for an invalid key, Unavailable without a database.
        """
        started_at, outcome, picked = clock.monotonic(), "failed", request.begin_pick()
        self._waiting.append(request)
        self._wake()
        try:
            await picked
            outcome = "picked" if request.replica else "none" if request.model else "confirmed"
        except WrongKey:
            outcome = "refused"
            raise
        except asyncio.CancelledError:
            outcome = metrics.CLIENT_LEFT
            # The cancellation may coincide with a picked replica, which no other code would count out.
            replica, request.replica = request.replica, None
            if replica is not None:
                self.release(replica)
            raise
        finally:
            metrics.pick_ended(outcome, clock.monotonic() - started_at)
        return request.replica

    def release(self, replica: Replica) -> None:
        """Stop counting one request on the replica (R2.73). It neither waits nor raises."""
        if self._held[replica.id] <= 1:
            del self._held[replica.id]
        else:
            self._held[replica.id] -= 1
        self._released[replica.id] += 1
        self._wake_soon()

    async def settle(self) -> None:
        """Create or renew this process's row. Set its in-flight counts to those in memory."""
        self._unsettled = True
        self._wake()
        await self.wait_until_idle()
        if self._unsettled:
            raise outage.unreachable_error()

    async def exclude(self, replica: Replica, *, has_wrong_model: bool = False) -> bool:
        """Exclude a replica that failed to serve from picks. Return True if it was not excluded before.

        Only the picked row is excluded, not a later row of the same slot. `has_wrong_model` is true if the
        engine responds but has another model or none.
        """
        reason = PhaseReason.WRONG_MODEL if has_wrong_model else PhaseReason.LOST
        return await terminations.lose(self._pool, replica.id, replica.address, reason=reason)

    async def renew(self) -> bool:
        """Renew the heartbeat of this process's row. Return False if the row no longer exists."""
        return await self._pool.run(statements.RENEW, self._process_parameters()) == 1

    async def report_counts(self) -> None:
        """Write the request counts of models since the last report. Errors are logged.

        A failed report is not repeated, because it may have been written.
        """
        try:
            await figures.add_counts(self._pool, metrics.take_model_counts(), now=clock.now())
        except (psycopg.Error, DatabaseError, *UNREACHABLE_ERRORS) as error:
            logger.info("Figures of some seconds are lost: %s", error)

    async def unregister(self) -> None:
        """Release all requests and remove this process's row, because the process stops."""
        await self.wait_until_idle()
        self._cancel_delayed()
        self._released.clear()
        await self._connection.close()
        parameters = {**self._process_parameters(), "ids": []}
        texts = (statements.LOCK_USED, statements.RELEASE_ALL, statements.DELETE_PROCESS)
        await self._pool.run_in_transaction([(text, parameters) for text in texts])

    async def wait_until_idle(self) -> None:
        """Wait until no statement is running."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def in_flight(self) -> int:
        """Return the number of running requests in this process."""
        return self._held.total()

    def _process_parameters(self) -> Parameters:
        now = clock.now()
        gap = now - timedelta(seconds=conf.cluster().web_stale_after)
        return {**self._identity, "now": now, "gap": gap}

    def _wake_soon(self) -> None:
        if self._released and self._task is None and self._delayed is None:
            self._delayed = asyncio.get_running_loop().call_later(RELEASE_DELAY_SECONDS, self._wake)

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
            count = await self._run_statement()
            while self._waiting or self._unsettled:
                if count >= MIN_CROWDED_PICKS:
                    await asyncio.sleep(CROWD_DELAY_SECONDS)
                count = await self._run_statement()
        except (*_RETRYABLE_ERRORS, *UNREACHABLE_ERRORS) as error:
            logger.warning("Cannot settle the counts of this process: %s", error)
            self._fail_waiting(outage.unreachable_error())
        except Exception:
            logger.exception("Picking failed")
            self._unsettled = True
            self._fail_waiting(ClusterError())
        finally:
            self._task = None
            self._wake_soon()

    def _fail_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            _fail_pick(request, error)

    async def _run_statement(self) -> int:
        """Run one statement for all waiting picks and releases. Return the number of picks."""
        if self._unsettled:
            await self._settle_counts()
        requests, self._waiting = (
            [request for request in self._waiting if not request.pick_result.cancelled()],
            [],
        )
        released, self._released = self._released, Counter()
        if not requests and not released:
            return 0
        exchange = _StatementBatch(requests, released)
        try:
            document = orjson.dumps(exchange.document(self._weights)).decode()
            values = (str(self.process_id), clock.now().isoformat(), document)
            rows = await self._connection.fetch_rows(statements.EXCHANGE, values)
        except (*_RETRYABLE_ERRORS, *UNREACHABLE_ERRORS) as error:
            # The statement may have taken effect: a settlement comes before the next exchange.
            self._unsettled = True
            self._waiting = [*self._retryable_requests(requests, error), *self._waiting]
        except Exception:
            self._waiting = [*requests, *self._waiting]  # the caller fails all of them
            raise
        else:
            self._distribute_replicas(exchange, rows)
        return len(requests)

    def _retryable_requests(
        self, requests: list[InferenceRequest], error: Exception
    ) -> list[InferenceRequest]:
        # After a lost connection there is exactly one more attempt: perhaps only that connection was dead.
        limit = _STATEMENT_ATTEMPTS if isinstance(error, _RETRYABLE_ERRORS) else 2
        for request in requests:
            request.pick_attempts += 1
            if request.pick_attempts >= limit:
                _fail_pick(request, outage.unreachable_error())
        if requests and requests[0].pick_attempts >= limit:
            logger.warning("Cannot pick replicas: %s", error)
        return [request for request in requests if not request.pick_result.done()]

    def _distribute_replicas(self, exchange: _StatementBatch, rows: list[tuple[Any, ...]]) -> None:
        owners: dict[str, Principal] = {}
        replicas: dict[int, list[Replica]] = {}
        is_cached: dict[int, bool | None] = {}
        for replica, node, name, text, number, flag, token, ask, index, has_prefix in rows:
            if replica is None:
                owners[name] = Principal("admin" if flag else "user", text, user_id=number)
            else:
                self._held[replica] += number
                picked = Replica(replica, node, index, name, text, dial_targets.bearer_token(token, flag))
                replicas.setdefault(ask, []).extend([picked] * number)
                is_cached[ask] = has_prefix
        for request, numbers in zip(exchange.requests, exchange.numbers, strict=True):
            owner = owners.get(request.key_hash)
            if request.key_hash and owner is None:
                self.confirmed_keys.discard(request.key_hash)
                _fail_pick(request, WrongKey())
                continue
            ask = next((number for number in numbers if replicas.get(number)), None)
            request.is_prefix_cached = is_cached.get(ask) if ask is not None else None
            self._complete_pick(request, owner, replicas[ask].pop() if ask is not None else None)

    def _complete_pick(
        self, request: InferenceRequest, owner: Principal | None, replica: Replica | None
    ) -> None:
        if request.pick_result.done():
            if replica is not None:
                self.release(replica)
            return
        if owner is not None:
            self.confirmed_keys.add(request.key_hash)
            request.principal, request.key_hash = owner, ""
        request.replica = replica
        request.pick_result.set_result(None)

    async def _settle_counts(self) -> None:
        await self._pool.check()
        held, self._released = dict(self._held), Counter()
        parameters = {**self._process_parameters(), "ids": list(held), "counts": list(held.values())}
        texts = (statements.ANNOUNCE, statements.LOCK_USED, statements.SETTLE)
        await self._pool.run_in_transaction([(text, parameters) for text in texts])
        self._unsettled = False


def _fail_pick(request: InferenceRequest, error: Exception) -> None:
    if not request.pick_result.done():
        request.pick_result.set_exception(error)


HEARTBEATS_PER_SILENCE_LIMIT = 3
"""Number of heartbeats of a process within the time after which it counts as dead."""
HEARTBEATS_PER_SETTLEMENT = 12
"""Number of heartbeats between two settlements of the counts.

A statement may take effect after its connection was lost, so the counts can differ.
"""


class ProcessHeartbeat:
    """Renews the database row of one web process periodically."""

    def __init__(self, picker: Picker, silence_limit: float) -> None:
        self._picker = picker
        self._interval = silence_limit / HEARTBEATS_PER_SILENCE_LIMIT
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the process. If the database is unreachable, a later heartbeat registers it."""
        await self._register()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Release all requests and remove the process's row."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._picker.report_counts()
        try:
            await self._picker.unregister()
        except UNREACHABLE_ERRORS as error:
            logger.warning(
                "Cannot remove the row of this web process; the liveness pass removes it: %s", error
            )

    async def _run(self) -> None:
        heartbeats = 0
        while True:
            await asyncio.sleep(self._interval)
            heartbeats += 1
            metrics.refresh()
            try:
                is_registered = await self._picker.renew()
            except UNREACHABLE_ERRORS as error:
                logger.warning("Cannot renew the row of this process: %s", error)
                continue
            await self._picker.report_counts()
            if not is_registered:
                logger.warning("This process was taken for dead; it announces itself again")
            if not is_registered or heartbeats % HEARTBEATS_PER_SETTLEMENT == 0:
                await self._register()

    async def _register(self) -> None:
        try:
            await self._picker.settle()
        except Unavailable as error:
            logger.warning("Cannot announce this process yet: %s", error)
