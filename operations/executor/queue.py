"""Protocol of an executor's queue: a source of items that run under a lease."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol, TypeVar
from uuid import UUID

from operations.ledger.progress import Attempt


class Claimed(Protocol):
    """A claimed item under a lease; `str` names it in the log."""

    @property
    def id(self) -> UUID:
        """Id of the leased row."""

    @property
    def fence(self) -> int:
        """The attempt's number: it may write only while the row still has it."""


C = TypeVar("C", bound=Claimed)


class Queue(Protocol[C]):
    """A queue of leased items. The calls that access rows run in threads."""

    name: str
    slots: int
    """Number of items that one executor runs concurrently."""

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> Sequence[C]:
        """Claim up to `limit` due items under a lease of `lease` seconds."""

    def renew(self, owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
        """Extend the leases of `owner` on `ids`; return the ids that it still holds, with their fences."""

    def release(self, owner: str, *, now: datetime) -> int:
        """Release all items of `owner`; return their number."""

    def reap(self) -> None:
        """Requeue the items whose lease has expired, of any process."""

    async def carry_out(self, claimed: C, /) -> None:
        """Run one attempt and record its outcome; raise LeaseLost or a DatabaseError if that fails."""

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """Set the callback for an attempt whose report is refused because it has lost its lease."""

    def forget(self, attempt: Attempt) -> None:
        """Drop the unwritten reports of an attempt that has ended."""

    def close(self) -> None:
        """Write no more reports, because the executor stops."""
