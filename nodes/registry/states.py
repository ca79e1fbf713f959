"""Events of a node and their effects: the transition table of `contract/scheduling.md` §1B.

A node is described by facts; `status` follows from them alone (R1.2). A row of the table states in which
statuses an event is allowed, the other conditions, and the effects on the facts and the replicas, with one
sentence for people; the diagram in `docs/node-states.md` is generated from it. Nothing here reads a clock or
a database: `change.py` turns the difference of two facts into the columns of an UPDATE.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nodes.models import BackendNode

PENDING, OFFLINE, DRAINING, UNHEALTHY, HEALTHY = "pending", "offline", "draining", "unhealthy", "healthy"
STATUSES = (PENDING, OFFLINE, DRAINING, UNHEALTHY, HEALTHY)
"""All statuses by precedence: a node has the first status that applies."""
_ANY_STATUS = frozenset(STATUSES)

Drain = Literal["", "own", "admin"]
Absence = Literal["", "silent", "left"]


@dataclass(frozen=True)
class Facts:
    """The facts about a node, from which its status follows.

    `drained` is `own` if the worker drained the node. `offline` is `silent` if the next heartbeat brings the
    node back.
    """

    approved: bool = False
    rejected: bool = False
    revoked: bool = False
    identified: bool = True
    drained: Drain = ""
    offline: Absence = ""
    unhealthy: bool = False


FACT_COLUMNS = {
    "approved": ("approved_at", "approved_by", "approval_reason"),
    "rejected": ("rejected_at", "rejected_by", "reject_reason"),
    "revoked": ("revoked_at", "revoked_by", "revoke_reason"),
    "drained": ("drained_at", "drained_by", "drain_reason"),
    "offline": ("offline_at", "offline_by", "offline_reason"),
    "unhealthy": ("unhealthy_at", "unhealthy_by", "unhealthy_reason"),
}
"""Columns of a node with the time, the author and the reason of each fact."""


def facts_of(node: "BackendNode") -> Facts:
    """Return the facts that the node's row holds."""
    drained: Drain = "" if node.drained_at is None else "own" if node.drain_is_own else "admin"
    offline: Absence = "" if node.offline_at is None else "silent" if node.offline_recovers else "left"
    return Facts(
        approved=node.approved_at is not None,
        rejected=node.rejected_at is not None,
        revoked=node.revoked_at is not None,
        identified=bool(node.fingerprint) or node.weak_identity,
        drained=drained,
        offline=offline,
        unhealthy=node.unhealthy_at is not None,
    )


def status_of(facts: Facts) -> str:
    """Return the status that follows from the facts. The generated column follows the same rule."""
    conditions = {
        PENDING: not facts.approved,
        OFFLINE: bool(facts.offline),
        DRAINING: bool(facts.drained),
        UNHEALTHY: facts.unhealthy,
        HEALTHY: True,
    }
    return next(status for status in STATUSES if conditions[status])


class Event(StrEnum):
    """The events that change a node's facts."""

    REGISTERED = "registered"
    AUTO_APPROVED = "auto_approved"
    APPROVED = "approved"
    REJECTED = "rejected"
    DRAINED = "drained"
    DRAINED_ITSELF = "drained_itself"
    DRAIN_ENDED = "drain_ended"
    RESUMED = "resumed"
    RESUMED_ITSELF = "resumed_itself"
    DEACTIVATED = "deactivated"
    FELL_SILENT = "fell_silent"
    HEARD_AGAIN = "heard_again"
    MARKED_UNHEALTHY = "marked_unhealthy"
    MARKED_HEALTHY = "marked_healthy"
    REVOKED = "revoked"
    HANDED_OVER = "handed_over"
    DEREGISTERED = "deregistered"


Replicas = Literal["kept", "unlisted", "idle", "all", "forgotten"]
"""The replicas of the node that end or depart with an event. Their rows stay until their engines have ended,
except with `forgotten` (`nodes/replicas/states.py`).
"""


@dataclass(frozen=True)
class Transition:
    """One row of the transition table: where an event is allowed, and its effects."""

    sentence: str
    allowed: frozenset[str]
    effect: Callable[[Facts], Facts]
    guard: Callable[[Facts], bool] = lambda facts: True
    guard_reason: str = ""
    """Why the event is not possible, if `guard` refuses it; part of the error message."""
    replicas: Replicas = "kept"


@dataclass(frozen=True)
class Refusal:
    """Why an event is not allowed for a node now."""

    reason: str


def _fact_change(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, **changes)


def _facts_after_registration(facts: Facts) -> Facts:
    drained: Drain = "" if facts.drained == "own" else facts.drained
    return replace(facts, identified=True, offline="", unhealthy=False, drained=drained)


def _facts_after_resume(facts: Facts) -> Facts:
    return replace(facts, drained="", unhealthy=False, offline="silent" if facts.offline else "")


TRANSITIONS: Mapping[Event, Transition] = {
    Event.REGISTERED: Transition(
        "The worker starts or reconnects: the node is online and its own drain ends. Approval and an admin's"
        " drain stay (R1.10 to R1.14).",
        _ANY_STATUS,
        _facts_after_registration,
        replicas="unlisted",
    ),
    Event.AUTO_APPROVED: Transition(
        "With LOCALAI_AUTO_APPROVE_NODES a registration approves, unless an admin rejected it (R1.10).",
        frozenset({PENDING}),
        _fact_change(approved=True),
        lambda facts: facts.identified and not facts.rejected and not facts.revoked,
        "an administrator rejected it or revoked its secret",
    ),
    Event.APPROVED: Transition(
        "An admin approves a pending node; an earlier rejection is undone (R1.15).",
        frozenset({PENDING}),
        _fact_change(approved=True, rejected=False, revoked=False),
        lambda facts: facts.identified,
        "no worker has registered since the secret was revoked",
    ),
    Event.REJECTED: Transition(
        "An admin rejects a pending node; registering again does not change that.",
        frozenset({PENDING}),
        _fact_change(rejected=True),
    ),
    Event.DRAINED: Transition(
        "An admin drains the node: no new requests. Only an admin ends that (R1.19).",
        _ANY_STATUS,
        _fact_change(drained="admin"),
        replicas="idle",
    ),
    Event.DRAINED_ITSELF: Transition(
        "The worker is stopping and drains itself. Its next registration ends that (R1.19).",
        _ANY_STATUS,
        lambda facts: replace(facts, drained=facts.drained or "own"),
        replicas="idle",
    ),
    Event.DRAIN_ENDED: Transition(
        "A draining node is idle or its deadline has passed: its replicas are removed.",
        frozenset({DRAINING}),
        _fact_change(),
        replicas="all",
    ),
    Event.RESUMED: Transition(
        "An admin returns the node to service; an offline one waits for its next heartbeat (R1.18).",
        frozenset({OFFLINE, DRAINING, UNHEALTHY}),
        _facts_after_resume,
    ),
    Event.RESUMED_ITSELF: Transition(
        "The worker ends its own drain, never an admin's.",
        frozenset({DRAINING}),
        _fact_change(drained=""),
        lambda facts: facts.drained == "own",
        "drained by an administrator",
    ),
    Event.DEACTIVATED: Transition(
        "The worker shuts down: offline until it registers again, even if heartbeats still arrive (R1.20).",
        _ANY_STATUS,
        _fact_change(offline="left"),
        replicas="all",
    ),
    Event.FELL_SILENT: Transition(
        "No heartbeat for too long: offline, also if draining or unhealthy, but not if pending (R5.4).",
        frozenset({DRAINING, UNHEALTHY, HEALTHY}),
        _fact_change(offline="silent"),
        replicas="all",
    ),
    Event.HEARD_AGAIN: Transition(
        "A heartbeat of a node that had lost contact: it is online again (R5.5).",
        _ANY_STATUS,
        _fact_change(offline=""),
        lambda facts: facts.offline == "silent",
        "contact was not lost",
    ),
    Event.MARKED_UNHEALTHY: Transition(
        "It did not answer a command, or nothing listens for it on the bus while a heartbeat is late."
        " Replicas stay, because the next pass may revert this (R1.17).",
        _ANY_STATUS,
        _fact_change(unhealthy=True),
    ),
    Event.MARKED_HEALTHY: Transition(
        "It has sent a heartbeat since it was marked unhealthy (R5.5), and answered on the bus (H7).",
        _ANY_STATUS,
        _fact_change(unhealthy=False),
        lambda facts: facts.unhealthy,
        "not marked unhealthy",
    ),
    Event.REVOKED: Transition(
        "An admin revokes the secret: permanently rejected, and the node is pending without identity.",
        _ANY_STATUS,
        _fact_change(approved=False, revoked=True, identified=False),
        lambda facts: facts.identified,
        "has no identity to revoke",
        replicas="all",
    ),
    Event.HANDED_OVER: Transition(
        "An admin accepts a worker with another secret: offline until that worker registers.",
        _ANY_STATUS,
        _fact_change(identified=True, offline="left"),
        replicas="all",
    ),
    Event.DEREGISTERED: Transition(
        "An admin removes the node (R1.21).",
        _ANY_STATUS,
        _fact_change(),
        replicas="forgotten",
    ),
}


def apply(event: Event, facts: Facts) -> Facts | Refusal:
    """Return the facts after `event`, or a `Refusal` if the event is not allowed."""
    row, status = TRANSITIONS[event], status_of(facts)
    if status not in row.allowed:
        return Refusal(f"the node is {status}")
    if not row.guard(facts):
        return Refusal(f"the node is {status}: {row.guard_reason}")
    return row.effect(facts)
