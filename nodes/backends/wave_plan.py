"""Which nodes of an upgrade go in which wave. Pure.

The canary shows what the upgrade does where the least is at stake. Where a model would be left without a
replica comes last of the nodes that are there; nodes that are away would hold up all others, so they end it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

CANARY = 0
"""The number of the canary's wave; the others count from 1."""


@dataclass(frozen=True)
class Options:
    """What may be asked of waves. `max_unavailable`: nodes upgraded at a time, at least 1."""

    max_unavailable: int = 1
    canary: bool = True


@dataclass(frozen=True)
class Member:
    """One node: its loaded replicas of the backend, and whether one of them is a model's last."""

    id: UUID
    name: str
    replicas: int = 0
    last: bool = False
    present: bool = True


def plan(members: Iterable[Member], options: Options) -> dict[UUID, int]:
    """The wave of each node."""
    order: Sequence[Member] = sorted(members, key=lambda m: (not m.present, m.last, m.replicas, m.name, m.id))
    first = min(1, len(order)) if options.canary else 0
    waves = {member.id: CANARY for member in order[:first]}
    for place, member in enumerate(order[first:]):
        waves[member.id] = 1 + place // options.max_unavailable
    return waves
