"""Which GPUs of a node a load gets, and how much of each. Pure (docs/decisions/0019).

One GPU if any has room: of those, the one that is left with the least (best fit), so that large gaps stay for
large models. Else the fewest: the roomiest ones, each with a share in proportion to its room, as an engine
that splits a model by layers takes it. Every part of a split needs `SPLIT_OVERHEAD` besides. A node that does
not tell its GPUs is taken as a whole.
"""

from collections.abc import Iterable, Mapping

SPLIT_OVERHEAD = 512 * 2**20
"""Bytes: a context and buffers on each GPU, and layers that cannot be cut."""

Rooms = frozenset[tuple[int, int]]
"""Pairs of a GPU's index and bytes, no index twice."""
Shares = Mapping[int, int]
"""Bytes by the GPU's index."""


def fit(free: int, rooms: Rooms, need: int) -> Shares | None:
    """The share of each GPU for a load of `need` bytes; None if the memory is lacking.

    Nothing for a need that is not known, and on a node that does not tell its GPUs. `free` is what the node
    has effectively free, which a budget may keep below what its GPUs have.
    """
    if need <= 0:
        return {}
    if free < need:
        return None
    if not rooms:
        return {}
    having = [(room, index) for index, room in rooms if room >= need]
    shares = {min(having)[1]: need} if having else _split(rooms, need)
    return shares if shares and total(shares, need) <= free else None


def _split(rooms: Rooms, need: int) -> dict[int, int]:
    """Over as few GPUs as can hold it, at least two; empty if all of them cannot."""
    # Negative, so that the roomiest comes first, and of equal ones the first by index.
    usable = sorted([(SPLIT_OVERHEAD - room, index) for index, room in rooms if room > SPLIT_OVERHEAD])
    there = 0
    for count, (negative, _) in enumerate(usable, 1):
        there -= negative
        if there >= need and count > 1:
            return {index: SPLIT_OVERHEAD - (need * less // there) for less, index in usable[:count]}
    return {}


def filled(rooms: Rooms, need: int) -> Shares:
    """What a load takes that fits nowhere: all that is free, the roomiest GPUs first."""
    shares, left = {}, need
    for negative, index in sorted([(-room, index) for index, room in rooms if room > 0]):
        if left <= 0:
            break
        shares[index] = min(-negative, left)
        left -= shares[index]
    return shares


def total(shares: Shares, need: int) -> int:
    """What the load takes of the node: more than it needs where it is split."""
    return sum(shares.values()) or need


def given_back(rooms: Rooms, shares: Iterable[tuple[int, int]]) -> Rooms:
    """The rooms with so much more on these GPUs, or less if negative; others than these stay as they are."""
    more = dict(shares)
    return frozenset((index, room + more.get(index, 0)) for index, room in rooms)
