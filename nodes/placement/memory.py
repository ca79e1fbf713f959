"""The memory of a node and its GPUs: a model's need, unallocated reservations, and fitting GPUs. Pure.

A worker reports every ten seconds how much memory is available, but not which engine uses the rest. So each
load records the bytes that it needs and the reading by which it was placed; neither ever changes. Afterwards
the node has at most the bytes of that reading, less the needs of this load and of all later loads. This
figure is the same whether an engine has allocated nothing, half or all of its memory. No heartbeat has to
decrement anything, and a load that ends without a replica releases its reservation with its row.

A published replica counts until the first reading after its publication, which is the first reading that
shows all of its memory. It counts longer while a load runs that was placed before: otherwise the replica's
allocation would be attributed to that load. Memory that is freed in the meantime may count as used until the
loads have ended. The opposite does not happen: no byte is reserved twice. All of this also applies to each
GPU of a node that reports its GPUs.

A load goes to the fitting GPU with the least memory left over, so that large gaps stay free for large models.
If no GPU fits, the load is split over as few GPUs as possible, those with the most free memory, in proportion
to their free memory (docs/decisions/0019). Each GPU of a split needs `SPLIT_OVERHEAD` in addition. A node
that does not report its GPUs counts as a whole.

`fit.py` estimates the memory that a model needs (R2.40, R2.41), `required_disk` the disk space for its files
(R2.37); `nodes/definitions/sizes.py` measures the files. 0 bytes means unknown.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

CLOCK_TOLERANCE = timedelta(seconds=1)
"""Assumed maximum difference between the clocks of two machines."""
SPLIT_OVERHEAD = 512 * 2**20
"""Bytes that each GPU of a split load needs in addition, for contexts, buffers and indivisible layers."""

FreeByGpu = frozenset[tuple[int, int]]
"""Pairs of a GPU's index and its free bytes; each index occurs once."""
BytesByGpu = Mapping[int, int]
"""Bytes by GPU index."""


def fit_gpus(free: int, free_by_gpu: FreeByGpu, need: int, cards: int = 0) -> BytesByGpu | None:
    """Return the bytes to take of each GPU for a load of `need` bytes; None if there is too little memory.

    The result is empty if the need is unknown or the node does not report its GPUs. `free` is the node's
    effectively free memory; a budget may keep it below the sum of its GPUs. If `cards` is not 0, the load
    takes equal parts of `cards` GPUs.
    """
    if need <= 0:
        return {}
    if free < need:
        return None
    if not free_by_gpu:
        return {}
    if cards:
        part = need // cards
        roomy = sorted((free_bytes, index) for index, free_bytes in free_by_gpu if free_bytes >= part)
        return {index: part for _, index in roomy[:cards]} if len(roomy) >= cards else None
    large_enough = [(free_bytes, index) for index, free_bytes in free_by_gpu if free_bytes >= need]
    shares = {min(large_enough)[1]: need} if large_enough else _split_over_gpus(free_by_gpu, need)
    return shares if shares and total_bytes(shares, need) <= free else None


def fit_stated_gpus(
    free: int, free_by_gpu: FreeByGpu, need: int, by_gpu: Iterable[tuple[int, int]]
) -> BytesByGpu | None:
    """Return the bytes to take of each GPU that the definition names; None if one of them has too little.

    GPUs that the node does not have are left out, as in llama.cpp: the other GPUs take more.
    """
    if need <= 0:
        return {}
    if free < need:
        return None
    rooms, stated = dict(free_by_gpu), dict(by_gpu)
    if not rooms or not stated:
        return {}
    present = {index: size for index, size in stated.items() if index in rooms}
    total = sum(present.values())
    shares = {index: need * size // total for index, size in present.items()} if total else {}
    return shares if shares and all(rooms[index] >= share for index, share in shares.items()) else None


def _split_over_gpus(free_by_gpu: FreeByGpu, need: int) -> dict[int, int]:
    """Split the need over as few GPUs as possible, at least two.

    Return {} if all GPUs together have too little memory.
    """
    # Negative, so that the GPU with the most memory comes first, and of equal ones the first by index.
    usable = sorted(
        [
            (SPLIT_OVERHEAD - free_bytes, index)
            for index, free_bytes in free_by_gpu
            if free_bytes > SPLIT_OVERHEAD
        ]
    )
    usable_bytes = 0
    for count, (negative, _) in enumerate(usable, 1):
        usable_bytes -= negative
        if usable_bytes >= need and count > 1:
            return {
                index: SPLIT_OVERHEAD - (need * negative_room // usable_bytes)
                for negative_room, index in usable[:count]
            }
    return {}


def fill_gpus(free_by_gpu: FreeByGpu, need: int) -> BytesByGpu:
    """Return the bytes to take of each GPU for a load that does not fit: GPUs with the most memory first."""
    shares, remaining = {}, need
    for negative, index in sorted(
        [(-free_bytes, index) for index, free_bytes in free_by_gpu if free_bytes > 0]
    ):
        if remaining <= 0:
            break
        shares[index] = min(-negative, remaining)
        remaining -= shares[index]
    return shares


def total_bytes(shares: BytesByGpu, need: int) -> int:
    """Return the bytes that a load takes of the node; more than its need if it is split."""
    return sum(shares.values()) or need


def add_free_bytes(free_by_gpu: FreeByGpu, shares: Iterable[tuple[int, int]]) -> FreeByGpu:
    """Add the bytes in `shares` to the free memory of their GPUs; negative bytes are subtracted."""
    added = dict(shares)
    return frozenset((index, free_bytes + added.get(index, 0)) for index, free_bytes in free_by_gpu)


def add_freed_memory(
    free: int,
    free_by_gpu: FreeByGpu,
    freed: Iterable[tuple[int, FreeByGpu]],
    *,
    most: int,
    gpu_totals: FreeByGpu,
) -> tuple[int, FreeByGpu]:
    """Return the free memory of a node and of its GPUs as if some replicas had ended.

    `freed`: the bytes of each of these replicas, in total and by GPU. Memory use is an estimate, so the
    results are limited to `most` and to each GPU's total. 0 or a missing GPU = not reported.
    """
    totals, freed_free, freed_gpus = dict(gpu_totals), free, dict(free_by_gpu)
    for amount, shares in freed:
        freed_free += amount
        for index, share in shares:
            if index in freed_gpus:
                freed_gpus[index] += share
    if most:
        freed_free = min(freed_free, max(most, free))
    capped = (
        (index, min(freed_gpus[index], max(totals.get(index) or freed_gpus[index], former)))
        for index, former in free_by_gpu
    )
    return freed_free, frozenset(capped)


NEVER = datetime.min.replace(tzinfo=UTC)
"""Time of the reading of a node that has never reported its memory."""


@dataclass(frozen=True)
class MemoryReading:
    """The available memory of a node in bytes, and the time of the worker's report."""

    available: int
    at: datetime
    ceiling: int = 0
    """Maximum bytes of a memory budget, 0 = no budget. It also limits earlier readings: otherwise the bytes
    above a lowered budget would count as allocated."""


def is_in_reading(loaded_at: datetime | None, read_at: datetime | None) -> bool:
    """Return True if a reading of time `read_at` shows the memory of an engine loaded at `loaded_at`.

    The times are those of two machines: their order is known only if they are far enough apart.
    """
    return loaded_at is not None and read_at is not None and loaded_at + CLOCK_TOLERANCE <= read_at


@dataclass(frozen=True)
class Reservation:
    """The bytes that one load needs, the reading by which it was placed, and the time of its publication.

    A reading from `loaded_at` on must show all of its memory, so callers add `CLOCK_TOLERANCE`.
    """

    needed: int
    seen: int
    seen_at: datetime
    loaded_at: datetime | None = None
    gpus: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By GPU index: the bytes needed, and the bytes that the reading showed as available; empty if unknown.
    """


def unallocated_on_gpu(reservations: Iterable[Reservation], index: int, reading: MemoryReading) -> int:
    """Return how many bytes of `reading.available`, of one GPU, loads have reserved but not yet allocated.

    A reservation without GPUs may use any GPU, so it counts on each GPU, as not allocated yet.
    """
    on_this_gpu = []
    for reservation in reservations:
        if not reservation.gpus:
            on_this_gpu.append(replace(reservation, seen=reading.available))
        elif index in reservation.gpus:
            needed, available = reservation.gpus[index]
            on_this_gpu.append(replace(reservation, needed=needed, seen=available))
    return unallocated_bytes(on_this_gpu, reading)


def unallocated_bytes(reservations: Iterable[Reservation], reading: MemoryReading) -> int:
    """Return how many bytes of `reading.available` loads have reserved but not yet allocated."""
    counted = _relevant_reservations(list(reservations), reading.at)
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


def _relevant_reservations(reservations: Sequence[Reservation], read_at: datetime) -> list[Reservation]:
    """Return the active loads, and the replicas that a relevant reading does not yet show completely.

    Relevant is the reading by which such a load or replica was placed, so each replica may move the earliest
    relevant reading back.
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


UNKNOWN_PAYLOAD = 2 * 2**30
MIN_MARGIN = 2**30


def required_disk(payload: int) -> int:
    """Return the bytes that must be free on a node's disk for `payload` bytes of files (R2.37)."""
    if payload <= 0:
        return UNKNOWN_PAYLOAD
    return payload + max(payload // 20, MIN_MARGIN)
