"""Registry of kinds of operations: the properties and functions that differ between kinds.

An app registers its kinds when it starts. So this package runs, cancels, retries and shows operations without
importing the code of their kinds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from localai_cluster.messaging.bus import Bus
from operations.executor.work import Handler, WakeUps
from operations.ledger.admission import Admission, Requester
from operations.models import KINDS, KindFacts, Operation


@dataclass(frozen=True)
class HandlerContext:
    """Objects that all handlers of a controller share."""

    bus: Bus
    wake_ups: WakeUps


class Targets(Protocol):
    """How to cancel and retry operations whose targets run independently (`Operation.by_parts`)."""

    def cancel(self, operation_id: UUID, *, actor: str, now: datetime, node_id: UUID | None) -> Operation:
        """Cancel the operation, or its target on one node."""

    def retry(
        self, operation_id: UUID, *, nodes: Sequence[UUID], requester: Requester, now: datetime
    ) -> Admission:
        """Repeat the failed targets, on these nodes or on all nodes."""


@dataclass(frozen=True)
class OperationKind(KindFacts):
    """One kind of operation: its properties for clients, and its functions."""

    handler: Callable[[HandlerContext], Handler] | None = None
    """Creates the handler of a controller. None: each target runs as an intent (a command that waits for one
    node)."""
    targets: Targets | None = None
    """How to cancel and retry independent targets. None: an operation is cancelled and retried as a whole."""
    retry_identity: Callable[[Operation, Sequence[UUID]], tuple[str, str]] | None = None
    """Returns key and element of a retry on fewer nodes. None: those of the operation."""
    cancel: Callable[[Operation, str, datetime], Operation] | None = None
    """Cancels an operation together with what it has requested, for an actor. None: only the operation is
    cancelled."""
    expires: bool = False
    """True if a retry is abandoned unless a request needs it within the install limit."""
    attempt_keys: tuple[str, ...] = ()
    """Payload keys that attempts write; a retry begins without them."""


class Hooks(Protocol):
    """Functions of the app `nodes` that the API and command line of `operations` call."""

    def annotate(self, entries: Sequence[dict[str, Any]], *, now: datetime) -> None:
        """Add to each waiting entry the reason of its wait."""

    def choose_waves(
        self, operation_id: UUID, choice: str, *, last_replicas: Sequence[str], actor: str, now: datetime
    ) -> Operation:
        """Continue or stop an operation that runs in waves."""

    def find_node(self, text: str) -> UUID:
        """Return the id of the node with this name, id or id prefix.

        Raise CommandError unless exactly one matches.
        """


_kinds: dict[str, OperationKind] = {}
_hooks: list[Hooks] = []


def register(hooks: Hooks, *kinds: OperationKind) -> None:
    """Set the hooks and add the kinds to the registry. A kind replaces a registered kind of the same name."""
    _hooks[:] = [hooks]
    _kinds.update((kind.name, kind) for kind in kinds)
    KINDS.update(_kinds)


def hooks() -> Hooks:
    """Return the registered hooks."""
    return _hooks[0]


def kind_of(operation: Operation) -> OperationKind:
    """Return the operation's kind; a default kind if it is not registered."""
    return _kinds.get(operation.kind, OperationKind(operation.kind))


def handlers(context: HandlerContext) -> dict[str, Handler]:
    """Create the handlers of a controller, by kind."""
    return {kind.name: kind.handler(context) for kind in _kinds.values() if kind.handler is not None}
