"""Actors of changes to nodes, in the form that events and the `*_by` columns store."""

from dataclasses import dataclass
from enum import StrEnum

from localai_cluster.accounts.principals import STATIC_ADMIN, Principal


class ActorKind(StrEnum):
    """Kind of an actor."""

    USER = "user"
    STATIC_KEY = "static_key"
    WORKER = "worker"
    TASK = "task"
    MAKE_RUN = "make_run"
    COMMAND = "command"
    SYSTEM = "system"


@dataclass(frozen=True)
class Actor:
    """The author of a change: a person, key, worker or process. Its text has at most 150 characters."""

    kind: ActorKind
    name: str

    def __str__(self) -> str:
        return self.name[:150]


STATIC_KEY = Actor(ActorKind.STATIC_KEY, STATIC_ADMIN.name)
WORKER = Actor(ActorKind.WORKER, "worker")
MAKE_RUN = Actor(ActorKind.MAKE_RUN, "make run")
CONTROLLER = Actor(ActorKind.SYSTEM, "controller")
AUTO_APPROVAL = Actor(ActorKind.SYSTEM, "auto-approval")


def task(name: str) -> Actor:
    """Return the actor of a recurring task or reconciler."""
    return Actor(ActorKind.TASK, name)


def command(user: str) -> Actor:
    """Return the actor of a management command: the user of the operating system who runs it."""
    return Actor(ActorKind.COMMAND, user)


def of_principal(principal: Principal) -> Actor:
    """Return the actor for the caller of a request: a person, a key or a worker."""
    if principal == STATIC_ADMIN:
        return STATIC_KEY
    return WORKER if principal.kind == "node" else Actor(ActorKind.USER, principal.name)
