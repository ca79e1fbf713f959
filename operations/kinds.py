"""Registry of kinds of operations: what a kind adds to what all operations have in common.

An app registers its kinds when it starts, so that this package runs, cancels, retries and shows operations
without knowing what they are about.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from localai_cluster.messaging.bus import Bus
from operations.changes.feed import KINDS, KindFacts
from operations.executor.work import Handler, WakeUps
from operations.ledger.admission import Admission, Requester
from operations.models import Operation


@dataclass(frozen=True)
class HandlerContext:
    """The objects that all handlers of a controller share."""

    bus: Bus
    wake_ups: WakeUps


class Targets(Protocol):
    """Cancellation and retry of an operation whose targets run on their own (`Operation.by_parts`)."""

    def cancel(self, operation_id: UUID, *, actor: str, now: datetime, node_id: UUID | None) -> Operation:
        """Cancel the operation, or its target on one node."""

    def retry(
        self, operation_id: UUID, *, nodes: Sequence[UUID], requester: Requester, now: datetime
    ) -> Admission:
        """Repeat the targets that failed, on these nodes or on all."""


@dataclass(frozen=True)
class OperationKind(KindFacts):
    """One kind of operation: what clients see of it, and how it runs."""

    handler: Callable[[HandlerContext], Handler] | None = None
    """Makes the handler of a controller; None: each target runs as an intent."""
    targets: Targets | None = None
    """The rules of operations that run by their targets; None: it is cancelled and retried as a whole."""
    retry_identity: Callable[[Operation, Sequence[UUID]], tuple[str, str]] | None = None
    """Returns key and element of a retry on fewer nodes; None: those of the operation."""
    cancel: Callable[[Operation, str, datetime], Operation] | None = None
    """Cancels an operation of this kind for an actor with what it has requested; None: it alone."""
    expires: bool = False
    """True if a retry is abandoned when no request has needed it within the install limit."""
    attempt_keys: tuple[str, ...] = ()
    """Keys of the payload that earlier attempts have left, which a retry begins without."""


class Hooks(Protocol):
    """The functions on nodes and waves that the API and command line of `operations` call."""

    def annotate(self, entries: Iterable[dict[str, Any]], *, now: datetime) -> None:
        """Add to each entry of an operation the reason for its wait."""

    def choose_waves(
        self, operation_id: UUID, choice: str, *, last_replicas: Sequence[str], actor: str, now: datetime
    ) -> None:
        """Continue or stop an operation that runs in waves."""

    def find_node(self, text: str) -> UUID:
        """Return the node with that name, id or id prefix; raise CommandError unless exactly one matches."""


_kinds: dict[str, OperationKind] = {}
_hooks: list[Hooks] = []


def register(hooks: Hooks, *kinds: OperationKind) -> None:
    """Set the hooks and add kinds; a later kind of the same name replaces the earlier one."""
    _hooks[:] = [hooks]
    _kinds.update((kind.name, kind) for kind in kinds)
    KINDS.update(_kinds)


def hooks() -> Hooks:
    """Return the registered hooks."""
    return _hooks[0]


def kind_of(operation: Operation) -> OperationKind:
    """Return the operation's kind; an unknown one has the common rules only."""
    return _kinds.get(operation.kind, OperationKind(operation.kind))


def handlers(context: HandlerContext) -> dict[str, Handler]:
    """Make the handlers of a controller, by kind."""
    return {kind.name: kind.handler(context) for kind in _kinds.values() if kind.handler is not None}
