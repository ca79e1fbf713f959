"""The outcome of a command to a worker: one sum type, which every caller matches exhaustively.

`Done` and `Refused` are the worker's replies. The other four mean no reply, and each needs a different
reaction: check later (`StillRunning`, `BusDown`), use another node (`NoResponders`), report a defect
(`Unreadable`).
"""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from localai_cluster.kit import errors

R = TypeVar("R")


class CommandFailed(errors.ClusterError):
    """The worker refused the command or failed, or cannot be given the command now."""

    message = "The worker has not run the command, or may not run it."
    status = 502
    code = "command_failed"


@dataclass(frozen=True)
class Done(Generic[R]):
    """The worker has executed the command."""

    reply: R


@dataclass(frozen=True)
class Refused(Generic[R]):
    """The worker replied that it did not execute the command, and why."""

    reason: str
    reply: R


@dataclass(frozen=True)
class StillRunning:
    """No reply within the time limit; the worker may still be running the command."""

    reason: str


@dataclass(frozen=True)
class NotSent(StillRunning):
    """The command was not sent, because the worker did not reply to the ping before it."""


@dataclass(frozen=True)
class NoResponders:
    """The worker is gone: nothing listens for it although our own connection works, or it was restarted."""

    reason: str


@dataclass(frozen=True)
class Restarted(NoResponders):
    """The worker's process was replaced; the command ended with the former process."""


@dataclass(frozen=True)
class NoCommandListener(NoResponders):
    """The worker replies to other requests, but nothing listens for this command: it may not support it."""


@dataclass(frozen=True)
class Unreadable:
    """The worker's reply is not a message of the expected kind."""

    reason: str


@dataclass(frozen=True)
class BusDown:
    """We are not connected to the bus; the state of the worker is unknown."""

    reason: str
    sent: bool = False
    """True if the command left before the connection was lost: the worker may be running it."""


Outcome: TypeAlias = Done[R] | Refused[R] | StillRunning | NoResponders | Unreadable | BusDown

NAMES: dict[type, str] = {
    Done: "done",
    Refused: "refused",
    NoResponders: "no_responders",
    StillRunning: "no_answer",
    BusDown: "bus_down",
    Unreadable: "unreadable",
}
"""Names of the outcomes in metrics."""
