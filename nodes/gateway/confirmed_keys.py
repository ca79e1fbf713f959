"""API keys that the database confirmed recently, in the memory of a web process.

A hint, never a proof: it only decides how much of a body is read before the statement that picks a replica
checks the key again. A change of a key or user empties it (NOTIFY). After a lost NOTIFY the process reads the
body of a request with a revoked key, no more.
"""

from localai_cluster.kit import clock

MAX_AGE = 60.0
"""Seconds that a confirmation stays valid."""
MOST_KEYS = 10_000


class ConfirmedKeys:
    """Hashes of keys with the time of their last confirmation. Not thread-safe: used on one event loop."""

    def __init__(self) -> None:
        self._confirmed_at: dict[str, float] = {}

    def __contains__(self, key_hash: str) -> bool:
        confirmed_at = self._confirmed_at.get(key_hash)
        return confirmed_at is not None and clock.monotonic() - confirmed_at < MAX_AGE

    def add(self, key_hash: str) -> None:
        """Record that the key is valid now."""
        if len(self._confirmed_at) >= MOST_KEYS and key_hash not in self._confirmed_at:
            self._confirmed_at.clear()
        self._confirmed_at[key_hash] = clock.monotonic()

    def discard(self, key_hash: str) -> None:
        """Remove a key that the database reported as invalid."""
        self._confirmed_at.pop(key_hash, None)

    def clear(self) -> None:
        """Remove all keys."""
        self._confirmed_at.clear()
