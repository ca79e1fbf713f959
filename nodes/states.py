"""What may happen to a node and what it changes: the transition table of `contract/scheduling.md` §1B.

`BackendNode.status` is derived from four facts (approved, offline, drained, unhealthy), so an event does not
set a status: it stamps or clears facts, from the statuses in which it is allowed. The table is data;
`changes` turns one of its rows into the columns of an UPDATE. Nothing here reads a clock or a database.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

SELF = "worker"
"""Actor of a drain that a worker asked for itself; such a drain ends when the worker registers again."""
SILENT = "silent"
"""Start of the `offline_reason` of a silent node: from there alone a beat brings it back (R5.5, R5.7)."""
DEREGISTERED = "deregistered by its worker"
ENROLLED = "enrolled, not seen yet"

PENDING, OFFLINE, DRAINING, UNHEALTHY, HEALTHY = "pending", "offline", "draining", "unhealthy", "healthy"
ALL = frozenset({PENDING, OFFLINE, DRAINING, UNHEALTHY, HEALTHY})


class Event(StrEnum):
    """What can happen to a node."""

    REGISTERED = "registered"
    APPROVED = "approved"
    DRAINED = "drained"
    DEACTIVATED = "deactivated"
    FELL_SILENT = "fell silent"
    HEARD_AGAIN = "heard again"


@dataclass(frozen=True)
class Transition:
    """From which statuses an event is allowed, which facts it stamps and clears, whether replica rows end."""

    allowed: frozenset[str]
    stamps: str = ""
    clears: tuple[str, ...] = ()
    drops_replicas: bool = False


TRANSITIONS: Mapping[Event, Transition] = {
    # R1.11 to R1.14: approval is not touched, so a pending node stays pending.
    Event.REGISTERED: Transition(ALL, clears=("offline", "unhealthy"), drops_replicas=True),
    Event.APPROVED: Transition(frozenset({PENDING}), stamps="approved"),
    # R1.19 drops the rows, which makes the worker's wait for its last requests pointless; ours keeps them.
    Event.DRAINED: Transition(ALL, stamps="drained"),
    Event.DEACTIVATED: Transition(ALL, stamps="offline", drops_replicas=True),
    # R5.4, R5.6, R5.8: a pending node has nothing to lose, an unhealthy or draining one ages like any other.
    Event.FELL_SILENT: Transition(
        frozenset({DRAINING, UNHEALTHY, HEALTHY}), stamps="offline", drops_replicas=True
    ),
    Event.HEARD_AGAIN: Transition(frozenset({OFFLINE}), clears=("offline",)),
}

_BY = {"approved": "approved_by", "drained": "drained_by"}
_WHY = {"drained": "drain_reason", "offline": "offline_reason", "unhealthy": "unhealthy_reason"}


def changes(event: Event, *, now: datetime, actor: str = "", reason: str = "") -> dict[str, Any]:
    """The columns that `event` writes, with who and why where the fact has room for it."""
    transition = TRANSITIONS[event]
    columns: dict[str, Any] = {"updated_at": now}
    if transition.stamps:
        columns |= _fact(transition.stamps, now, actor, reason)
    for fact in transition.clears:
        columns |= _fact(fact, None, "", "")
    return columns


def _fact(name: str, at: datetime | None, actor: str, reason: str) -> dict[str, Any]:
    columns: dict[str, Any] = {f"{name}_at": at}
    if name in _BY:
        columns[_BY[name]] = actor
    if name in _WHY:
        columns[_WHY[name]] = reason
    return columns
