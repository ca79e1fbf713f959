"""Failures for each address: tokens, node secrets, API keys (D-FAILED-TOKENS), sign-ins (D-SIGN-IN).

Over the limit an address may not try another token until the minute is over, not even the right one. What
names a node is still looked at, so that it cannot be locked out: its own secret, 256 random bits, and the
shared token of a node that has nothing better. Everything else is answered 429, also the shared token for a
node that is not known by it: a right guess must look like a wrong one. A right API key too goes on working
beside wrong ones, and its way costs nothing: only what was refused is counted. From an address over the limit
a body is read after its key is confirmed, which costs a statement if the process does not know the key.
Passwords are fewer and looked at slowly, so their tries are counted before they are looked at, and those that
were right are taken back.

The counts lie in Valkey, so that all web processes share them; while it is away each process counts for
itself: that locks no address out, and nothing fails. A count lives for two minutes, and a process keeps
those of at most `MOST_ADDRESSES`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, TypeVar

from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.redis import RedisCache
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from localai_cluster import clock, conf, errors

log = logging.getLogger(__name__)

LIMIT = 30
"""Failures that an address has in one window, by default: those of five workers that try as they do."""
SIGN_INS = 5
"""Wrong passwords that an address has in one window (§5.4)."""
WINDOW = 60
"""Seconds; windows follow each other without a gap, the same for all addresses."""
MOST_ADDRESSES = 10_000
_PAUSE = 5
"""Seconds for which a Valkey that did not answer is left alone."""
_PATIENCE = 0.5
"""Seconds for which it is waited for."""

T = TypeVar("T")


class TooManyFailures(errors.ClusterError):
    """Too many failures from this address."""

    status = 429
    code = "too_many_failures"
    permanent = False

    def __init__(self, retry_after: float, what: str = "tokens or secrets") -> None:
        super().__init__(f"too many failed {what} from this address; try again later")
        self.retry_after = retry_after


def source(address: str) -> str:
    """Whose failures count together: an IPv4 address, or the /64 of an IPv6 one; "" if it is neither."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or ip_network((found, 64), strict=False))
    return str(found)


class Failures:
    """Counts in `shared`, or while that does not answer in this process alone; `what` is what fails."""

    def __init__(
        self,
        shared: BaseCache | None,
        own: BaseCache,
        limit: int = LIMIT,
        what: str = "tokens or secrets",
    ) -> None:
        self._shared, self._own, self._limit, self._what = shared, own, limit, what
        self._refused: dict[str, int] = {}
        """Addresses that `note` refused in this process, with the window in which it did."""

    def check(self, address: str, now: datetime) -> None:
        """Raises TooManyFailures if the address may not try another one in this window."""
        if (who := source(address)) and self._count(who, _window(now)) >= self._limit:
            raise TooManyFailures(_rest(now), self._what)

    def note(self, address: str, now: datetime) -> None:
        """Counts one failure; raises TooManyFailures if that is over the limit.

        An address that cannot be told from others (a reverse proxy on a socket) is not limited.
        """
        count = self._add(address, now)
        self.tell(address, now)
        if count > self._limit:
            if len(self._refused) >= MOST_ADDRESSES:
                self._refused.clear()
            self._refused[source(address)] = _window(now)
        self._judge(count, now)

    def was_refused(self, address: str, now: datetime) -> bool:
        """Return True if this process refused the address in this window; without I/O."""
        return self._refused.get(source(address)) == _window(now)

    async def noted(self, refusal: errors.ClusterError, address: str) -> errors.ClusterError:
        """Counts one failure off the event loop; the refusal that the caller gets, `refusal` or 429."""
        try:
            await asyncio.to_thread(self.note, address, clock.now())
        except TooManyFailures as over:
            return over
        return refusal

    def begin(self, address: str, now: datetime) -> None:
        """Counts a try before it is looked at; raises TooManyFailures if it must not be.

        Many tries at once are no more than as many one after the other. A right one is taken back
        (`forgive`), a wrong one is told (`tell`).
        """
        self._judge(self._add(address, now), now)

    def forgive(self, address: str, now: datetime) -> None:
        """Takes back the try that began at `now`: it was right."""
        if who := source(address):
            self._ask(lambda kept: _one_less(kept, f"{who}|{_window(now)}"))

    def tell(self, address: str, now: datetime) -> None:
        """Logs a failure that was counted, with the sum, once a minute for each address."""
        who, window = source(address), _window(now)
        if who and self._ask(lambda kept: kept.add(f"{who}|told", 1, WINDOW)):
            recently = self._count(who, window) + self._count(who, window - 1)
            log.warning("failed %s from %s within two minutes: %d", self._what, who, recently)

    def _add(self, address: str, now: datetime) -> int:
        who = source(address)
        return self._ask(lambda kept: _one_more(kept, f"{who}|{_window(now)}")) if who else 0

    def _judge(self, count: int, now: datetime) -> None:
        if count > self._limit:
            raise TooManyFailures(_rest(now), self._what)

    def _count(self, who: str, window: int) -> int:
        return int(self._ask(lambda kept: kept.get(f"{who}|{window}", 0)))

    def _ask(self, what: Callable[[BaseCache], T]) -> T:
        if self._shared is None or self._own.get("away"):
            return what(self._own)
        try:
            return what(self._shared)
        except (RedisError, OSError) as error:
            self._own.set("away", 1, _PAUSE)
            log.warning("failed %s are counted by this process alone: %s", self._what, type(error).__name__)
            return what(self._own)


def _one_more(kept: BaseCache, key: str) -> int:
    if kept.add(key, 1, 2 * WINDOW):
        return 1
    try:
        return kept.incr(key)
    except ValueError:
        return 1  # evicted meanwhile


def _one_less(kept: BaseCache, key: str) -> None:
    with suppress(ValueError):  # evicted meanwhile
        kept.decr(key)


def _window(now: datetime) -> int:
    return int(now.timestamp()) // WINDOW


def _rest(now: datetime) -> float:
    """Seconds until the window ends."""
    return WINDOW - now.timestamp() % WINDOW


def process_counts(name: str, addresses: int) -> LocMemCache:
    """Counts in the memory of this process; the addresses that were quiet for longest go first."""
    return LocMemCache(name, {"OPTIONS": {"MAX_ENTRIES": 3 * addresses}})


@cache
def shared() -> Failures:
    """The counts of tokens and secrets of this cluster."""
    return Failures(*_places("failures"), conf.cluster().failed_tokens)


@cache
def api_keys() -> Failures:
    """The counts of API keys of this cluster: apart, so that a stale key locks no worker out."""
    return Failures(*_places("failed-keys"), conf.cluster().failed_tokens, "API keys")


@cache
def sign_ins() -> Failures:
    """The counts of passwords of this cluster."""
    return Failures(*_places("sign-ins"), SIGN_INS, "sign-ins")


def _places(name: str) -> tuple[BaseCache | None, BaseCache]:
    """Where counts of this name lie: for all web processes, and for this one."""
    url = conf.cluster().redis_url
    common = RedisCache(url, {"KEY_PREFIX": name, "OPTIONS": _options()}) if url else None
    return common, process_counts(name, MOST_ADDRESSES)


def _options() -> dict[str, Any]:
    """No second try: the caller waits."""
    return {
        "socket_timeout": _PATIENCE,
        "socket_connect_timeout": _PATIENCE,
        "retry": Retry(NoBackoff(), 0),
    }
