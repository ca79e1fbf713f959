"""State machine of an operation, as a table: event, source states, target state and a sentence.

The ledger is the only caller. A claim matches only rows that are due; every other event needs the row to be
processing under the caller's fence, so a late event matches no row and changes nothing (I3, O56: terminal is
sticky).
"""

from dataclasses import dataclass
from enum import StrEnum

from operations.models import Status


class Event(StrEnum):
    """Event that changes an operation's status."""

    CLAIM = "claim"
    POSTPONE = "postpone"
    WAIT = "wait"
    RELEASE = "release"
    LOSE = "lose"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"


@dataclass(frozen=True)
class Transition:
    """A transition from any of `sources` to `target`."""

    sources: frozenset[Status]
    target: Status
    sentence: str


def _from(*sources: Status) -> frozenset[Status]:
    return frozenset(sources)


TRANSITIONS: dict[Event, Transition] = {
    Event.CLAIM: Transition(
        _from(Status.PENDING, Status.WAITING),
        Status.PROCESSING,
        "A controller takes the lease and a new fence.",
    ),
    Event.POSTPONE: Transition(
        _from(Status.PROCESSING),
        Status.PENDING,
        "An attempt ended early; it is tried again at the next look.",
    ),
    Event.WAIT: Transition(
        _from(Status.PROCESSING),
        Status.WAITING,
        "It waits for a node; one that could take it wakes it.",
    ),
    Event.RELEASE: Transition(
        _from(Status.PROCESSING), Status.PENDING, "Its controller stops and hands it back at once."
    ),
    Event.LOSE: Transition(
        _from(Status.PROCESSING),
        Status.PENDING,
        "The lease ran out: its controller is gone; another one goes on.",
    ),
    Event.COMPLETE: Transition(_from(Status.PROCESSING), Status.COMPLETED, "The outcome is as asked."),
    Event.FAIL: Transition(
        _from(Status.PROCESSING),
        Status.FAILED,
        "It cannot be done; the error says why and stays until dismissed.",
    ),
    Event.CANCEL: Transition(
        _from(Status.PROCESSING),
        Status.CANCELLED,
        "No request needs it any more.",
    ),
}


def after(event: Event, status: str) -> Status:
    """Return the next status; raise ValueError if the table does not allow `event`."""
    if status not in TRANSITIONS[event].sources:
        raise ValueError(f"{event} cannot happen to an operation that is {status}")
    return TRANSITIONS[event].target
