"""Choose the GPUs of a node for a load, and the memory on each of them. Pure (docs/decisions/0019).

One GPU is chosen if any has enough memory free: of those, the GPU with the least left (best fit), so that
large gaps stay for large models. Otherwise the fewest GPUs: those with the most memory free, each with a
share in proportion to it, as an engine that splits a model by layers takes it. Each GPU of a split needs
`SPLIT_OVERHEAD` in addition. A node that does not report its GPUs counts as a whole.
"""

from collections.abc import Iterable, Mapping

SPLIT_OVERHEAD = 512 * 2**20
"""Bytes for a context and buffers on each GPU, and for layers that cannot be cut."""

Rooms = frozenset[tuple[int, int]]
"""Pairs of a GPU's index and its free bytes; each index occurs once."""
Shares = Mapping[int, int]
"""Bytes by the GPU's index."""


def fit(free: int, rooms: Rooms, need: int) -> Shares | None:
    """Return the bytes of each GPU for a load of `need` bytes; None if the memory is lacking.

    The result is empty if the need is unknown or the node does not report its GPUs. `free` is the node's
    effectively free memory, which a budget may keep below that of its GPUs.
    """
    if need <= 0:
        return {}
    if free < need:
        return None
    if not rooms:
        return {}
    large_enough = [(room, index) for index, room in rooms if room >= need]
    shares = {min(large_enough)[1]: need} if large_enough else _split(rooms, need)
    return shares if shares and total(shares, need) <= free else None


def _split(rooms: Rooms, need: int) -> dict[int, int]:
    """Split the need over the fewest GPUs that can hold it, at least two; empty if all of them cannot."""
    # Negative, so that the GPU with the most memory comes first, and of equal ones the first by index.
    usable = sorted([(SPLIT_OVERHEAD - room, index) for index, room in rooms if room > SPLIT_OVERHEAD])
    usable_bytes = 0
    for count, (negative, _) in enumerate(usable, 1):
        usable_bytes -= negative
        if usable_bytes >= need and count > 1:
            return {
                index: SPLIT_OVERHEAD - (need * negative_room // usable_bytes)
                for negative_room, index in usable[:count]
            }
    return {}


def filled(rooms: Rooms, need: int) -> Shares:
    """Return the memory of a load that fits nowhere: all that is free, GPUs with the most memory first."""
    shares, remaining = {}, need
    for negative, index in sorted([(-room, index) for index, room in rooms if room > 0]):
        if remaining <= 0:
            break
        shares[index] = min(-negative, remaining)
        remaining -= shares[index]
    return shares


def total(shares: Shares, need: int) -> int:
    """Return the bytes that the load takes of the node: more than its need if it is split."""
    return sum(shares.values()) or need


def given_back(rooms: Rooms, shares: Iterable[tuple[int, int]]) -> Rooms:
    """Add these bytes to the free memory of these GPUs (subtract if negative); keep the other GPUs."""
    added = dict(shares)
    return frozenset((index, room + added.get(index, 0)) for index, room in rooms)
