"""What a health call says about the process at an address."""

from enum import StrEnum


class Sign(StrEnum):
    """R4.38. An engine may serve one request at a time: if it does not answer in time it is busy."""

    ALIVE = "alive"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
