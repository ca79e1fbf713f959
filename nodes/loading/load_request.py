"""The request in the payload of a load: the model, whether it is a scale-up, and the allowed nodes."""

from dataclasses import dataclass
from uuid import UUID

from operations.models import Operation

EXCLUDED_NODES, ALLOWED_NODES, SCALE_UP = "besides", "only", "another"
REASON, REPLACES = "reason", "replaces"
"""Payload keys."""
LACKS_ROOM = "lacks_room"
"""Payload key: the memory that this load waits for is held by the replica it replaces."""


@dataclass(frozen=True)
class LoadRequest:
    """The request of a load, as parsed from its operation's payload."""

    is_scale_up: bool
    """True for one more replica. Otherwise any serving replica satisfies the load."""
    excluded_nodes: frozenset[UUID]
    """Nodes whose replicas are about to stop."""
    allowed_nodes: frozenset[UUID] | None
    """None: all nodes."""
    reason: str
    """The reason for the scale-up."""
    replaces: UUID | None = None
    """The replica of a former definition that is terminated when this one serves."""

    @property
    def is_restricted(self) -> bool:
        """True if some nodes are not allowed."""
        return self.allowed_nodes is not None or bool(self.excluded_nodes)


ANYWHERE = LoadRequest(is_scale_up=False, excluded_nodes=frozenset(), allowed_nodes=None, reason="")
"""The load of an inference request: any node, no scale-up."""


def request_of(operation: Operation) -> LoadRequest:
    """Parse the operation's payload."""
    payload = operation.payload
    allowed_nodes = payload.get(ALLOWED_NODES)
    return LoadRequest(
        is_scale_up=bool(payload.get(SCALE_UP)),
        excluded_nodes=frozenset(map(UUID, payload.get(EXCLUDED_NODES, ()))),
        allowed_nodes=None if allowed_nodes is None else frozenset(map(UUID, allowed_nodes)),
        reason=payload.get(REASON, ""),
        replaces=UUID(payload[REPLACES]) if payload.get(REPLACES) else None,
    )
