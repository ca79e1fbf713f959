"""What an executor works on: the one protocol of everything that is carried out under a lease."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol, TypeVar
from uuid import UUID

from operations.ledger.progress import Attempt


class Claimed(Protocol):
    """One piece of work under a lease; its text names it in the log."""

    @property
    def id(self) -> UUID:
        """Whose lease it is."""

    @property
    def fence(self) -> int:
        """The attempt's number: it may write only while the row still has it."""


C = TypeVar("C", bound=Claimed)


class Queue(Protocol[C]):
    """Due, claim, renew, hand back, carry out. The calls that touch rows run in threads."""

    name: str
    slots: int
    """How much one executor carries out at a time."""

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> Sequence[C]:
        """Take up to `limit` pieces that are due under a lease of `lease` seconds."""

    def renew(self, owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
        """Extend the leases of `owner` on `ids`; return id and fence of those that are still its own."""

    def release(self, owner: str, *, now: datetime) -> int:
        """Hands back everything that `owner` holds; answers how much."""

    def reap(self) -> None:
        """Take back what was claimed under a lease that ran out, in any process."""

    async def carry_out(self, claimed: C, /) -> None:
        """One attempt, with its outcome written; raises LeaseLost or a DatabaseError if it could not be."""

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """Who is told when a report is refused because the work is no longer that attempt's."""

    def forget(self, attempt: Attempt) -> None:
        """The attempt has ended; what it reported last is of no use."""

    def close(self) -> None:
        """The executor stops: no more reports are written."""
