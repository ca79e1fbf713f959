"""What may come of a command to a worker: one sum type, which every caller matches exhaustively.

`Done` and `Refused` are the worker's answers. The other four are no answer, and each asks for something else:
look again (`StillRunning`, `BusDown`), go elsewhere (`NoResponders`), report a defect (`Unreadable`).
"""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Done(Generic[R]):
    """The worker did it."""

    reply: R


@dataclass(frozen=True)
class Refused(Generic[R]):
    """The worker answered that it did not do it, and why."""

    reason: str
    reply: R


@dataclass(frozen=True)
class StillRunning:
    """No answer within the time limit; the worker may still be at it."""

    reason: str


@dataclass(frozen=True)
class NotSent(StillRunning):
    """The worker did not answer the question before the command, so the command was not sent."""


@dataclass(frozen=True)
class NoResponders:
    """The worker is gone: nothing listens, although our own connection is good, or it was restarted."""

    reason: str


@dataclass(frozen=True)
class Restarted(NoResponders):
    """The worker is there again as another process: the command died with the former one."""


@dataclass(frozen=True)
class Unheard(NoResponders):
    """The worker answered other questions, but nothing listens for this command: it may not know it."""


@dataclass(frozen=True)
class Unreadable:
    """The worker's answer is not a message of this kind."""

    reason: str


@dataclass(frozen=True)
class BusDown:
    """We are not connected to the bus. This says nothing about the worker."""

    reason: str


Outcome: TypeAlias = Done[R] | Refused[R] | StillRunning | NoResponders | Unreadable | BusDown

NAMES: dict[type, str] = {
    Done: "done",
    Refused: "refused",
    NoResponders: "no_responders",
    StillRunning: "no_answer",
    BusDown: "bus_down",
    Unreadable: "unreadable",
}
"""What figures call the outcome of one question."""
