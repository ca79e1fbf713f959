"""Back-off: the delay before the next attempt after failures in a row."""

_MAX_DOUBLINGS = 30


def delay(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `failures` consecutive failures.

    The delay is `first` after one failure, doubles with each further failure, and is at most `longest`.
    """
    return float(min(first * 2.0 ** min(max(failures - 1, 0), _MAX_DOUBLINGS), longest))
