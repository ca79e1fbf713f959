"""Rate limit for failed authentication, per client address and minute (D-FAILED-TOKENS, D-SIGN-IN).

Refused tokens, node secrets, API keys and passwords are counted. From an address over its limit:

- A node's own secret (256 random bits) is still checked, and so is the shared token of a node that registered
  with it. So others at the same address lock out no node.
- A valid API key keeps working. The body of its request is read after the key is confirmed, which costs a
  statement if the process has not cached the key.
- Every other request gets 429 until the minute is over, also with a right password or shared token, because
  a right guess must look like a wrong one.

A password is hashed slowly, so an attempt is counted before the check, and uncounted if it succeeds.

The counts are in Valkey, so that all web processes share them. While Valkey is unreachable each process
counts for itself: no address is locked out, and no request fails. A count lives for two minutes, and a
process keeps the counts of at most `MAX_ADDRESSES`.
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

from localai_cluster.kit import clock, conf, errors

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 30
"""Default maximum of failures per address and window: those of five workers with default retries."""
SIGN_IN_FAILURE_LIMIT = 5
"""Maximum number of wrong passwords per address and window (§5.4)."""
WINDOW = 60
"""Seconds of a window in which failures are counted. All addresses have the same windows."""
MAX_ADDRESSES = 10_000
_OUTAGE_PAUSE_SECONDS = 5
"""Seconds during which Valkey is not used after it did not respond."""
_TIMEOUT_SECONDS = 0.5
"""Seconds until a call to Valkey times out."""

T = TypeVar("T")


class TooManyFailures(errors.ClusterError):
    """The address has exceeded its limit of failed authentication."""

    status = 429
    code = "too_many_failures"
    permanent = False

    def __init__(self, retry_after: float, credentials: str = "tokens or secrets") -> None:
        super().__init__(f"too many failed {credentials} from this address; try again later")
        self.retry_after = retry_after


def counter_key(address: str) -> str:
    """Return the key of an address's count, "" if the text is no IP address.

    The key is the IPv4 address, or the /64 of an IPv6 address.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped or ip_network((ip, 64), strict=False))
    return str(ip)


class Failures:
    """Counts of failures per address, in `shared` or, while it is unreachable, in `local`.

    `credentials` names the counted credentials in messages.
    """

    def __init__(
        self,
        shared: BaseCache | None,
        local: BaseCache,
        limit: int = DEFAULT_LIMIT,
        credentials: str = "tokens or secrets",
    ) -> None:
        self._shared, self._local, self._limit, self._credentials = shared, local, limit, credentials
        self._refused: dict[str, int] = {}
        """Addresses that `note` refused in this process, with the window of the refusal."""

    def check(self, address: str, now: datetime) -> None:
        """Raise TooManyFailures if the address must not try another credential in this window."""
        if (key := counter_key(address)) and self._count(key, _window_number(now)) >= self._limit:
            raise TooManyFailures(_seconds_left(now), self._credentials)

    def note(self, address: str, now: datetime) -> None:
        """Count a failure of the address. Raise TooManyFailures if the count is over the limit.

        An address that many callers share (a reverse proxy on a socket) has no limit.
        """
        count = self._add(address, now)
        self.log_failure(address, now)
        if count > self._limit:
            if len(self._refused) >= MAX_ADDRESSES:
                self._refused.clear()
            self._refused[counter_key(address)] = _window_number(now)
        self._check_count(count, now)

    def was_refused(self, address: str, now: datetime) -> bool:
        """Return True if this process refused the address in this window. It does no I/O."""
        return self._refused.get(counter_key(address)) == _window_number(now)

    async def note_in_thread(self, refusal: errors.ClusterError, address: str) -> errors.ClusterError:
        """Count a failure in a thread. Return the error for the caller: `refusal`, or TooManyFailures."""
        try:
            await asyncio.to_thread(self.note, address, clock.now())
        except TooManyFailures as over:
            return over
        return refusal

    def begin(self, address: str, now: datetime) -> None:
        """Count an attempt before its password is checked. Raise TooManyFailures over the limit.

        Concurrent attempts count like consecutive attempts. The caller calls `forgive` after a successful
        attempt and `log_failure` after a failed one.
        """
        self._check_count(self._add(address, now), now)

    def forgive(self, address: str, now: datetime) -> None:
        """Subtract the attempt that began at `now`, because it was successful."""
        if key := counter_key(address):
            self._call(lambda counts: _decrement(counts, f"{key}|{_window_number(now)}"))

    def log_failure(self, address: str, now: datetime) -> None:
        """Log the failures of an address with their number, at most once a minute."""
        key, window = counter_key(address), _window_number(now)
        if key and self._call(lambda counts: counts.add(f"{key}|told", 1, WINDOW)):
            recently = self._count(key, window) + self._count(key, window - 1)
            log.warning("failed %s from %s within two minutes: %d", self._credentials, key, recently)

    def _add(self, address: str, now: datetime) -> int:
        key = counter_key(address)
        return self._call(lambda counts: _increment(counts, f"{key}|{_window_number(now)}")) if key else 0

    def _check_count(self, count: int, now: datetime) -> None:
        if count > self._limit:
            raise TooManyFailures(_seconds_left(now), self._credentials)

    def _count(self, key: str, window: int) -> int:
        return int(self._call(lambda counts: counts.get(f"{key}|{window}", 0)))

    def _call(self, operation: Callable[[BaseCache], T]) -> T:
        if self._shared is None or self._local.get("away"):
            return operation(self._local)
        # Every process imports this module, and only those that count need 6 MB more.
        from redis.exceptions import RedisError

        try:
            return operation(self._shared)
        except (RedisError, OSError) as error:
            self._local.set("away", 1, _OUTAGE_PAUSE_SECONDS)
            log.warning(
                "failed %s are counted by this process alone: %s", self._credentials, type(error).__name__
            )
            return operation(self._local)


def _increment(counts: BaseCache, key: str) -> int:
    if counts.add(key, 1, 2 * WINDOW):
        return 1
    try:
        return counts.incr(key)
    except ValueError:
        return 1  # evicted meanwhile


def _decrement(counts: BaseCache, key: str) -> None:
    with suppress(ValueError):  # evicted meanwhile
        counts.decr(key)


def _window_number(now: datetime) -> int:
    return int(now.timestamp()) // WINDOW


def _seconds_left(now: datetime) -> float:
    """Return the seconds until the window ends."""
    return WINDOW - now.timestamp() % WINDOW


def in_memory_counters(name: str, addresses: int) -> LocMemCache:
    """Return a cache for counts in this process, which drops the least recently used addresses."""
    return LocMemCache(name, {"OPTIONS": {"MAX_ENTRIES": 3 * addresses}})


@cache
def token_failures() -> Failures:
    """Return the counter of wrong tokens and node secrets."""
    return Failures(*_open_caches("failures"), conf.cluster().failed_tokens)


@cache
def api_keys() -> Failures:
    """Return the counter of wrong API keys. It is separate, so that a stale key blocks no worker."""
    return Failures(*_open_caches("failed-keys"), conf.cluster().failed_tokens, "API keys")


@cache
def sign_ins() -> Failures:
    """Return the counter of wrong passwords."""
    return Failures(*_open_caches("sign-ins"), SIGN_IN_FAILURE_LIMIT, "sign-ins")


def _open_caches(name: str) -> tuple[BaseCache | None, BaseCache]:
    """Return the caches for counts with this name: the shared one, and that of this process."""
    from django.core.cache.backends.redis import RedisCache

    url = conf.cluster().redis_url
    common = RedisCache(url, {"KEY_PREFIX": name, "OPTIONS": _client_options()}) if url else None
    return common, in_memory_counters(name, MAX_ADDRESSES)


def _client_options() -> dict[str, Any]:
    """Return options of the Valkey client. It does not retry, because a caller waits."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_timeout": _TIMEOUT_SECONDS,
        "socket_connect_timeout": _TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }
