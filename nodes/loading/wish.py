"""What the operation of a load asks for besides its model: whether one more replica is wanted although others
serve, and where it may go.
"""

from dataclasses import dataclass
from uuid import UUID

from operations.models import Operation

BESIDES, ONLY, ANOTHER, REASON, REPLACES = "besides", "only", "another", "reason", "replaces"
"""Where the payload says it."""
LACKS_ROOM = "lacks_room"
"""Where a load that waits says that the replica which it replaces takes the room that it needs."""


@dataclass(frozen=True)
class LoadWish:
    """As the operation's payload says it."""

    another: bool
    """One more replica; without it a replica that serves is all that is wanted."""
    besides: frozenset[UUID]
    """The nodes whose replicas are about to stop: the load is for another node."""
    only: frozenset[UUID] | None
    """The nodes that it is for; None = any."""
    reason: str
    """Why one more replica was asked for."""
    replaces: UUID | None = None
    """The replica of a former definition that goes when this one serves."""

    @property
    def restricted(self) -> bool:
        """Whether it may not go to every node."""
        return self.only is not None or bool(self.besides)


ANYWHERE = LoadWish(another=False, besides=frozenset(), only=None, reason="")
"""What a request asks for."""


def wish_of(operation: Operation) -> LoadWish:
    """What this load asks for."""
    said = operation.payload
    only = said.get(ONLY)
    return LoadWish(
        another=bool(said.get(ANOTHER)),
        besides=frozenset(map(UUID, said.get(BESIDES, ()))),
        only=None if only is None else frozenset(map(UUID, only)),
        reason=said.get(REASON, ""),
        replaces=UUID(said[REPLACES]) if said.get(REPLACES) else None,
    )
