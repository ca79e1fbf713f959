"""The result of a health call to the process at an address."""

from enum import StrEnum


class Sign(StrEnum):
    """The result of a probe (R4.38).

    An engine may serve one request at a time, so one that does not answer in time is busy.
    """

    ALIVE = "alive"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
