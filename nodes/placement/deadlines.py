"""How long a load may take: its LoadModel by the size of the files, and the whole by what it does. Pure.

All in seconds. A whole load has no fixed limit: `hold` is how long it is wanted at first, and what moves
pushes that on (`nodes/loading/hold.py`).
"""

LOAD, LONGEST_LOAD = 300.0, 6 * 3600.0
"""C28: of a payload that is not known, and of any."""
_A_GIB = 20.0
INSTALL = 900.0
MARGIN, LEAST_HOLD = 300.0, 1500.0
"""C29."""
STALL = 300.0
"""C30: without progress for so long, a load is not wanted any more."""
_READ_A_SECOND = 32 * 2**20
LONGEST_HOLD = 24 * 3600.0
"""C31."""


def load_limit(payload: int, given: float = 0.0) -> float:
    """R2.60: the limit of one LoadModel for files of `payload` bytes (0 = not known); `given` wins."""
    if given > 0:
        return given
    return min(LOAD + _A_GIB * max(payload, 0) / 2**30, LONGEST_LOAD)


def hold(install: float, load: float) -> float:
    """R2.24, R2.25: how long a load is wanted before anything has moved."""
    return max((install if install > 0 else INSTALL) + (load if load > 0 else LOAD) + MARGIN, LEAST_HOLD)


def pushed_on(age: float, more: float, base: float) -> float:
    """R2.24: for how much longer a load of this age is wanted that has moved, or begins what may take `more`.

    Never past the absolute limit, which is at least the base.
    """
    return max(min(more, max(LONGEST_HOLD, base) - age), 0.0)


def hashing(size: int) -> float:
    """How long a worker may take that reads a file of `size` bytes for its hash."""
    return max(size, 0) / _READ_A_SECOND
