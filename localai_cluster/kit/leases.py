"""Leases: a row belongs to one process while that process renews it.

`fence` is the number of the attempt. A write names the attempt that makes it, and changes nothing when the
row has a later one. Every function takes the queryset of the rows under a lease, and runs in the caller's
transaction. Row locks are `FOR NO KEY UPDATE`: a stronger one would make the foreign key of a child, checked
at its commit, wait for its parent's transaction.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from django.db import models
from django.db.models import QuerySet

from localai_cluster.kit.rows import claim_rows, lock_free

Attempt = tuple[UUID, int]
"""One attempt at a leased row: id and fence."""
MOST_LOST_LEASES = 10
"""Lost leases after which a row is given up."""
COLUMNS = ["lease_owner", "lease_until", "fence", "lost_leases"]


class LeaseLost(Exception):
    """Another attempt owns the row, or it has ended; the caller's write is void."""


class LeasedRow(models.Model):
    """A row that a process claims under a lease."""

    id: "models.UUIDField[UUID, UUID]"
    lost_leases = models.IntegerField(default=0)
    """Attempts whose process stopped renewing the lease."""
    lease_owner = models.CharField(max_length=64, blank=True, default="")
    lease_until = models.DateTimeField(null=True, blank=True)
    fence = models.BigIntegerField(default=0)

    class Meta:
        abstract = True

    def end_lease(self) -> None:
        """Clear the owner; the caller saves it."""
        self.lease_owner, self.lease_until = "", None


L = TypeVar("L", bound=LeasedRow)


def claim(
    rows: "QuerySet[L]", owner: str, *, now: datetime, lease: float, limit: int | None = None
) -> list[L]:
    """Return up to `limit` of the rows that no other transaction locks, locked, each with a new attempt.

    The caller saves `COLUMNS`.
    """
    claimed = lock_free(rows, limit=limit)
    for row in claimed:
        row.lease_owner, row.lease_until = owner, now + timedelta(seconds=lease)
        row.fence += 1
    return claimed


def renew(
    leased: "QuerySet[L]", owner: str, ids: Sequence[UUID], *, now: datetime, lease: float
) -> dict[UUID, int]:
    """Extend the leases of `owner` on `ids`; return the ids that it still owns, with their fences.

    Pass only the ids of running attempts: the other leases must expire. A row that is locked, because its
    progress or outcome is being written, is skipped: one blocked row must not cost all others their leases.
    The owner keeps it, because `lock_expired` skips locked rows too.
    """
    mine = leased.filter(pk__in=ids, lease_owner=owner)
    claim_rows(mine.only("pk"), lease_until=now + timedelta(seconds=lease))
    return dict(mine.values_list("id", "fence"))


def lock_held(leased: "QuerySet[L]", owner: str) -> list[L]:
    """Return the rows of `owner`, which is stopping, locked in the order of their ids."""
    return list(leased.filter(lease_owner=owner).order_by("pk").select_for_update(no_key=True))


def lock_expired(leased: "QuerySet[L]", *, now: datetime) -> tuple[list[L], list[L]]:
    """Return the unlocked rows whose lease has expired: those to retry, counted, and those to give up."""
    expired = leased.filter(lease_until__lt=now).order_by("pk")
    lost = lock_free(expired)
    retried = [row for row in lost if row.lost_leases < MOST_LOST_LEASES]
    given_up = [row for row in lost if row.lost_leases >= MOST_LOST_LEASES]
    for row in retried:
        row.lost_leases += 1
    return retried, given_up


def lock_attempts(leased: "QuerySet[L]", attempts: Collection[Attempt]) -> dict[UUID, L]:
    """Return the rows of the attempts that still own theirs, locked in the order of their ids."""
    named = leased.filter(pk__in={id for id, _ in attempts}).order_by("pk")
    return {row.id: row for row in named.select_for_update(no_key=True) if (row.id, row.fence) in attempts}


def lock_attempt(leased: "QuerySet[L]", attempt: Attempt) -> L:
    """Return the row of the attempt, locked; raise LeaseLost if the attempt does not own it any more."""
    row = lock_attempts(leased, [attempt]).get(attempt[0])
    if row is None:
        raise LeaseLost(str(attempt[0]))
    return row


def confirm(leased: "QuerySet[L]", attempt: Attempt) -> None:
    """Raise LeaseLost if the attempt does not own the row any more; lock and write nothing."""
    if not leased.filter(pk=attempt[0], fence=attempt[1]).exists():
        raise LeaseLost(str(attempt[0]))
