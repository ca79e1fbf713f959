"""The assignment of an upgrade's nodes to waves. Pure.

The canary shows the effect of the upgrade where the least is at stake. Nodes with the last replica of a model
follow after the other reachable nodes. Unreachable nodes would delay all others, so they come last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

CANARY = 0
"""Number of the canary's wave; the others count from 1."""


@dataclass(frozen=True)
class Options:
    """Options of a request for waves. `max_unavailable`: nodes upgraded at a time, at least 1."""

    max_unavailable: int = 1
    canary: bool = True


@dataclass(frozen=True)
class Member:
    """One node: its loaded replicas of the backend, and True in `last` if one is a model's last."""

    id: UUID
    name: str
    replicas: int = 0
    last: bool = False
    present: bool = True


def plan(members: Iterable[Member], options: Options) -> dict[UUID, int]:
    """Return the wave of each node."""
    order: Sequence[Member] = sorted(members, key=lambda m: (not m.present, m.last, m.replicas, m.name, m.id))
    first = min(1, len(order)) if options.canary else 0
    waves = {member.id: CANARY for member in order[:first]}
    for place, member in enumerate(order[first:]):
        waves[member.id] = 1 + place // options.max_unavailable
    return waves
