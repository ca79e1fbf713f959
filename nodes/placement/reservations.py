"""Compute the available memory of a node that its loads will still allocate.

A worker reports every ten seconds how much memory is available, not which engine uses the rest. So each load
records the bytes that it needs and the reading by which it was placed; neither ever changes. The node then
has at most what that reading showed, less the needs of this load and all loads placed since: the same figure
whether an engine has allocated nothing, half or all of its share. No heartbeat has to decrement anything, and
a load that ends without a replica releases its reservation with its row.

A published replica counts until the first reading after its publication, which is the first to show all of
its memory. It counts longer while a load runs that was placed before: otherwise its allocation would be taken
for that load's.

Memory that is freed meanwhile (an unload) may count as taken until the loads have ended. The opposite does
not happen: no byte is reserved twice.

The same holds for each GPU of a node that reports its GPUs, with the load's share of that GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

NEVER = datetime.min.replace(tzinfo=UTC)
"""The reading time of a node that has reported no figure yet."""


@dataclass(frozen=True)
class MemoryReading:
    """The available memory of a node in bytes, and the time of its worker's report."""

    available: int
    at: datetime
    ceiling: int = 0
    """Most bytes that a budget allows, 0 = all. An earlier figure above it has not been allocated since."""


@dataclass(frozen=True)
class Reservation:
    """The bytes that one load needs, the reading by which it was placed, and the time of its publication."""

    needed: int
    seen: int
    seen_at: datetime
    loaded_at: datetime | None = None
    gpus: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By GPU index: the bytes needed of it and the bytes available by that reading; empty if unknown."""


def on_gpu(reservations: Iterable[Reservation], index: int, reading: MemoryReading) -> int:
    """Return the bytes of `reading.available` on one GPU that loads of its node will still allocate.

    A reservation without GPUs may go to any: all of it counts on each GPU, as not allocated yet.
    """
    on_this_gpu = []
    for reservation in reservations:
        if not reservation.gpus:
            on_this_gpu.append(replace(reservation, seen=reading.available))
        elif index in reservation.gpus:
            needed, available = reservation.gpus[index]
            on_this_gpu.append(replace(reservation, needed=needed, seen=available))
    return outstanding(on_this_gpu, reading)


def outstanding(reservations: Iterable[Reservation], reading: MemoryReading) -> int:
    """Return the bytes of `reading.available` that loads of this node will still allocate."""
    counted = _counted(list(reservations), reading.at)
    unread = sum(
        reservation.needed
        for reservation in counted
        if reservation.loaded_at is None or reservation.loaded_at > reading.at
    )
    most = needed_since = 0
    for reservation in sorted(counted, key=lambda reservation: reservation.seen_at, reverse=True):
        needed_since += reservation.needed
        available = min(reservation.seen, reading.ceiling) if reading.ceiling else reservation.seen
        most = max(most, needed_since - (available - reading.available))
    return min(most, unread)


def _counted(reservations: Sequence[Reservation], read_at: datetime) -> list[Reservation]:
    """Return the loads under way, and the replicas published since the earliest reading that matters.

    Each replica that counts moves that reading back: its own reading matters as well.
    """
    counted = [reservation for reservation in reservations if reservation.loaded_at is None]
    earliest = min([read_at, *(reservation.seen_at for reservation in counted)])
    published = [
        (reservation.loaded_at, reservation)
        for reservation in reservations
        if reservation.loaded_at is not None
    ]
    for loaded_at, reservation in sorted(published, key=lambda pair: pair[0], reverse=True):
        if loaded_at <= earliest:
            break
        counted.append(reservation)
        earliest = min(earliest, reservation.seen_at)
    return counted
