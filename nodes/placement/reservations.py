"""What the loads of a node still need of the memory that its last reading shows as available.

A worker says how much memory is available, not whose the rest is, and it says so every ten seconds. So each
load writes down what it needs and the reading it was placed by, and nothing of that ever changes. The node
then has at most what that reading showed, less what this load and all placed since need: the same figure
whether an engine has allocated nothing, half or all of its share. No beat has to step anything down, and a
load that ends without a replica takes what it reserved with its row.

A published replica counts until the first reading after that, which is the first to show all of it. It counts
on while a load runs that was placed before: what it allocated would be taken for that load's otherwise.

Memory that is given back meanwhile (an unload) may count as taken until the loads have ended. The other way
round does not happen: no byte is given away twice.

The same holds for each GPU of a node that tells them one by one, with the load's share of that GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

NEVER = datetime.min.replace(tzinfo=UTC)
"""When a node was read that has told no figure yet."""


@dataclass(frozen=True)
class MemoryReading:
    """The available memory of a node in bytes, and when its worker said so."""

    available: int
    at: datetime
    ceiling: int = 0
    """What a budget allows at most; 0 = all. An earlier figure above it has not been allocated since."""


@dataclass(frozen=True)
class Reservation:
    """One load's: the bytes that it needs, the reading by which it was placed, and when it was published."""

    needed: int
    seen: int
    seen_at: datetime
    loaded_at: datetime | None = None
    gpus: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By index what it needs of a GPU, and what was available there by that reading; empty: not known."""


def on_gpu(reservations: Iterable[Reservation], index: int, reading: MemoryReading) -> int:
    """Bytes of `reading.available` on one GPU that loads of its node will still allocate.

    What is known to be on no GPU in particular may go to any: all of it counts on each, as not allocated yet.
    """
    its = []
    for one in reservations:
        if not one.gpus:
            its.append(replace(one, seen=reading.available))
        elif index in one.gpus:
            needed, seen = one.gpus[index]
            its.append(replace(one, needed=needed, seen=seen))
    return outstanding(its, reading)


def outstanding(reservations: Iterable[Reservation], reading: MemoryReading) -> int:
    """Bytes of `reading.available` that loads of this node will still allocate."""
    counted = _counted(list(reservations), reading.at)
    unread = sum(one.needed for one in counted if one.loaded_at is None or one.loaded_at > reading.at)
    most = needed_since = 0
    for one in sorted(counted, key=lambda one: one.seen_at, reverse=True):
        needed_since += one.needed
        seen = min(one.seen, reading.ceiling) if reading.ceiling else one.seen
        most = max(most, needed_since - (seen - reading.available))
    return min(most, unread)


def _counted(reservations: Sequence[Reservation], read_at: datetime) -> list[Reservation]:
    """The loads under way, and the replicas published since the earliest reading that matters.

    Which one that is goes back with every replica that counts: its own reading matters as well.
    """
    counted = [one for one in reservations if one.loaded_at is None]
    earliest = min([read_at, *(one.seen_at for one in counted)])
    published = [(one.loaded_at, one) for one in reservations if one.loaded_at is not None]
    for loaded_at, one in sorted(published, key=lambda pair: pair[0], reverse=True):
        if loaded_at <= earliest:
            break
        counted.append(one)
        earliest = min(earliest, one.seen_at)
    return counted
