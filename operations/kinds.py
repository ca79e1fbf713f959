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
from operations.executor.wake_ups import WakeUps
from operations.executor.work import Handler
from operations.ledger.admission import Admission
from operations.models import Operation


@dataclass(frozen=True)
class Requester:
    """The user who requests something, for the record."""

    actor: str
    request_id: str = ""
    client_address: str = ""


@dataclass(frozen=True)
class HandlerContext:
    """What the handlers of a controller share."""

    bus: Bus
    wake_ups: WakeUps


class Targets(Protocol):
    """Cancellation and retry of an operation that runs by its targets (`Operation.by_parts`)."""

    def cancel(self, operation_id: UUID, *, actor: str, now: datetime, node_id: UUID | None) -> Operation:
        """Cancel the operation, or its target on one node."""

    def retry(
        self, operation_id: UUID, *, nodes: Sequence[UUID], requester: Requester, now: datetime
    ) -> Admission:
        """Repeat the targets that failed, on these nodes or on all."""


@dataclass(frozen=True)
class OperationKind:
    """One kind of operation, by its name."""

    name: str
    handler: Callable[[HandlerContext], Handler] | None = None
    """Makes the handler of a controller; None: its targets run by themselves."""
    targets: Targets | None = None
    """The rules of operations that run by their targets; None: it is cancelled and retried as a whole."""
    retry_identity: Callable[[Operation, Sequence[UUID]], tuple[str, str]] | None = None
    """Returns key and element of a retry on fewer nodes; None: those of the operation."""
    expires: bool = False
    """True if a retry is abandoned when no request has needed it within the install limit."""
    attempt_keys: tuple[str, ...] = ()
    """Keys of the payload that earlier attempts have left, which a retry begins without."""


_kinds: dict[str, OperationKind] = {}
_annotators: list[Callable[[Iterable[dict[str, Any]], datetime], None]] = []


def register(*kinds: OperationKind) -> None:
    """Add kinds; a later one of the same name replaces the earlier one."""
    _kinds.update((kind.name, kind) for kind in kinds)


def register_annotator(annotate: Callable[[Iterable[dict[str, Any]], datetime], None]) -> None:
    """Add a function that completes the entries of operations that are shown."""
    if annotate not in _annotators:
        _annotators.append(annotate)


def kind_of(operation: Operation) -> OperationKind:
    """Return the operation's kind; an unknown one has the common rules only."""
    return _kinds.get(operation.kind, OperationKind(operation.kind))


def handlers(context: HandlerContext) -> dict[str, Handler]:
    """Make the handlers of a controller, by kind."""
    return {kind.name: kind.handler(context) for kind in _kinds.values() if kind.handler is not None}


def annotate(entries: Iterable[dict[str, Any]], now: datetime) -> None:
    """Complete the entries of operations that are shown."""
    entries = list(entries)
    for function in _annotators:
        function(entries, now)
