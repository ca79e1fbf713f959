"""API keys that the database confirmed a moment ago, in the memory of a web process.

A hint, never a proof: it only decides how much of a body is read before the statement that picks a replica
checks the key again. A change of a key or user empties it (NOTIFY); after a lost NOTIFY a body of a revoked
key is read, no more.
"""

from localai_cluster import clock

MAX_AGE = 60.0
"""Seconds for which a confirmation counts."""
MOST_KEYS = 10_000


class ConfirmedKeys:
    """Hashes of keys with the time of their last confirmation. Used on one event loop."""

    def __init__(self) -> None:
        self._confirmed_at: dict[str, float] = {}

    def __contains__(self, key_hash: str) -> bool:
        confirmed_at = self._confirmed_at.get(key_hash)
        return confirmed_at is not None and clock.monotonic() - confirmed_at < MAX_AGE

    def add(self, key_hash: str) -> None:
        """Remember that the key is valid now."""
        if len(self._confirmed_at) >= MOST_KEYS and key_hash not in self._confirmed_at:
            self._confirmed_at.clear()
        self._confirmed_at[key_hash] = clock.monotonic()

    def discard(self, key_hash: str) -> None:
        """Forget a key that turned out to be invalid."""
        self._confirmed_at.pop(key_hash, None)

    def clear(self) -> None:
        """Forget all keys."""
        self._confirmed_at.clear()
