"""Limits for the duration of a load: its LoadModel by the size of the files, the load by its steps. Pure.

All in seconds. A load as a whole has no fixed limit: `progress_deadline` is its first limit, and any progress
extends it (`nodes/loading/load_request.py`).
"""

LOAD, LONGEST_LOAD = 300.0, 6 * 3600.0
"""Limit for a payload of unknown size, and the largest limit (C28)."""
_SECONDS_PER_GIB = 20.0
INSTALL = 900.0
MARGIN, LEAST_HOLD = 300.0, 1500.0
"""The margin and the smallest progress deadline (C29)."""
STALL = 300.0
"""Time without progress after which a load is abandoned (C30)."""
_BYTES_READ_PER_SECOND = 32 * 2**20
LONGEST_HOLD = 24 * 3600.0
"""Largest age of a load (C31)."""


def load_limit(payload: int, given: float = 0.0) -> float:
    """Return the limit of one LoadModel for files of `payload` bytes (0 = unknown); `given` wins (R2.60)."""
    if given > 0:
        return given
    return min(LOAD + _SECONDS_PER_GIB * max(payload, 0) / 2**30, LONGEST_LOAD)


def progress_deadline(install: float, load: float) -> float:
    """Return the progress deadline of a load before any progress (R2.24, R2.25)."""
    return max((install if install > 0 else INSTALL) + (load if load > 0 else LOAD) + MARGIN, LEAST_HOLD)


def extend_deadline(age: float, more: float, base: float) -> float:
    """Return the seconds that a load may take from now: after progress, or before a step of `more` (R2.24).

    With its `age` they never exceed the absolute limit, which is at least `base`.
    """
    return max(min(more, max(LONGEST_HOLD, base) - age), 0.0)


def hashing_limit(size: int) -> float:
    """Return the time that a worker may take to hash a file of `size` bytes."""
    return max(size, 0) / _BYTES_READ_PER_SECOND
