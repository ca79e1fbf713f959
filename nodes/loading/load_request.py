"""The request in the payload of a load: the model, whether it is a scale-up, and the allowed nodes."""

from dataclasses import dataclass
from uuid import UUID

from operations.models import Operation

BESIDES, ONLY, ANOTHER, REASON, REPLACES = "besides", "only", "another", "reason", "replaces"
"""Payload keys."""
LACKS_ROOM = "lacks_room"
"""Payload key: the memory that this load waits for is held by the replica it replaces."""


@dataclass(frozen=True)
class LoadWish:
    """The request of a load, as parsed from its operation's payload."""

    another: bool
    """True for a scale-up: one more replica. Otherwise any serving replica satisfies the load."""
    besides: frozenset[UUID]
    """Excluded nodes, whose replicas are about to stop."""
    only: frozenset[UUID] | None
    """Allowed nodes; None = any."""
    reason: str
    """The reason for the scale-up."""
    replaces: UUID | None = None
    """The replica of a former definition that is terminated when this one serves."""

    @property
    def restricted(self) -> bool:
        """True if some nodes are not allowed."""
        return self.only is not None or bool(self.besides)


ANYWHERE = LoadWish(another=False, besides=frozenset(), only=None, reason="")
"""The load of an inference request: any node, no scale-up."""


def wish_of(operation: Operation) -> LoadWish:
    """Parse the operation's payload."""
    payload = operation.payload
    only = payload.get(ONLY)
    return LoadWish(
        another=bool(payload.get(ANOTHER)),
        besides=frozenset(map(UUID, payload.get(BESIDES, ()))),
        only=None if only is None else frozenset(map(UUID, only)),
        reason=payload.get(REASON, ""),
        replaces=UUID(payload[REPLACES]) if payload.get(REPLACES) else None,
    )
