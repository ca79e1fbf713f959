"""Leases and claims: a row belongs to one process, while that process renews it or until a time.

`fence` is the number of the attempt. A write names the attempt that makes it, and changes nothing when the
row has a later one. Every function takes the queryset of the rows under a lease, and runs in the caller's
transaction. A claim is a column with the time until which a row belongs to one process, without a fence. It
is taken with `SKIP LOCKED`, so no process waits for another, and expires by itself when a process dies. Row
locks are `FOR NO KEY UPDATE`: a stronger one would make the foreign key of a child, checked at its commit,
wait for its parent's transaction.
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from django.db import connection, connections, models, transaction
from django.db.models import F, QuerySet
from django.db.models.expressions import RawSQL

M = TypeVar("M", bound=models.Model)


def lock_free(rows: "QuerySet[M]", *, limit: int | None = None) -> list[M]:
    """Lock and return up to `limit` of the rows that no other transaction has locked.

    This needs a transaction. Rows that are locked are skipped, so the order of the locks does not matter.
    """
    return list(rows.select_for_update(no_key=True, skip_locked=True, of=("self",))[:limit])


def claim_rows(rows: "QuerySet[M]", *, limit: int | None = None, **changes: Any) -> list[M]:
    """Lock up to `limit` of the rows that no other transaction has locked, and write `changes` to them.

    The returned rows have the values from before `changes`.
    """
    with transaction.atomic(savepoint=False):
        claimed = lock_free(rows, limit=limit)
        if claimed:
            rows.model._base_manager.filter(pk__in=[row.pk for row in claimed]).update(**changes)
    return claimed


def seconds_until_due(rows: "QuerySet[M]", column: str, *, now: datetime, at_most: float) -> float:
    """Return the seconds until the first row is due, at most `at_most`; a row without a time is due."""
    first = list(rows.order_by(F(column).asc(nulls_first=True)).values_list(column, flat=True)[:1])
    if not first:
        return at_most
    return 0.0 if first[0] is None else min(max((first[0] - now).total_seconds(), 0.0), at_most)


def update_rows(rows: Sequence[models.Model], columns: Sequence[str]) -> None:
    """Write these columns of the rows by one UPDATE that joins arrays of values.

    Django's `bulk_update` writes a CASE with a branch for each row into each column, so its cost grows with
    the square of the number of rows.
    """
    if not rows:
        return
    meta = rows[0]._meta
    chosen = [field for field in meta.concrete_fields if field.primary_key or field.name in columns]
    values, source, parameters = _values_as_sql(rows, chosen)
    changes = ", ".join(f"{name} = {value}" for name, value in values.items() if name != '"id"')
    with connection.cursor() as cursor:
        cursor.execute(
            f'UPDATE "{meta.db_table}" AS t SET {changes} FROM {source} WHERE t.id = v.id', parameters
        )


def insert_rows(rows: Sequence[models.Model]) -> None:
    """Insert the rows by one INSERT from arrays of values. Generated keys are not set on the rows.

    Django's `bulk_create` sends every column of every row, which takes most of the time of a request for many
    nodes.
    """
    if not rows:
        return
    meta = rows[0]._meta
    fields = [f for f in meta.concrete_fields if not (f.generated or isinstance(f, models.AutoField))]
    values, source, parameters = _values_as_sql(rows, fields)
    names, chosen = ", ".join(values), ", ".join(values.values())
    with connection.cursor() as cursor:
        cursor.execute(f'INSERT INTO "{meta.db_table}" ({names}) SELECT {chosen} FROM {source}', parameters)
    for row in rows:
        row._state.adding, row._state.db = False, connection.alias  # a later `save` is an UPDATE


def _values_as_sql(
    rows: Sequence[models.Model], fields: Sequence[Any]
) -> tuple[dict[str, str], str, list[Any]]:
    """Return SQL expressions for the column values, the SQL of their source `v`, and all parameters.

    A value that is equal in all rows is sent once.
    """
    database = connections[connection.alias]  # each value would look it up again
    constants, arrays, columns = list[Any](), list[Any]([list(range(len(rows)))]), dict[str, str]()
    types, varying = ["%s::int[]"], ["number"]
    for field in fields:
        # Without its length: a cast to varchar(n) would cut a text that is too long, instead of refusing it.
        kind = str(field.db_type(database)).partition("(")[0]
        name = database.ops.quote_name(field.column)
        values = [getattr(row, field.attname) for row in rows]
        if not field.primary_key and values.count(values[0]) == len(rows):
            constants.append(field.get_db_prep_save(values[0], database))
            columns[name] = f"%s::{kind}"
            continue
        arrays.append([field.get_db_prep_save(value, database) for value in values])
        types.append(f"%s::{kind}[]")
        varying.append(name)
        columns[name] = f"v.{name}"
    return columns, f"unnest({', '.join(types)}) AS v ({', '.join(varying)})", constants + arrays


def as_array(ids: Iterable[UUID]) -> RawSQL:
    """Return the ids as one array parameter for an `in` lookup; a list would send a parameter for each id."""
    return RawSQL("SELECT unnest(%s::uuid[])", [list(ids)])


Attempt = tuple[UUID, int]
"""An attempt at a leased row: the row's id and fence."""
MAX_LOST_LEASES = 10
"""Number of lost leases after which a row is given up."""
LEASE_COLUMNS = ["lease_owner", "lease_until", "fence", "lost_leases"]
"""Columns that `claim`, `end_lease` and `lock_expired_rows` change; the caller saves them."""


class LeaseLost(Exception):
    """The attempt no longer owns its row, so its write has no effect."""


class LeasedRow(models.Model):
    """A row that one process owns under a lease."""

    id: "models.UUIDField[UUID, UUID]"
    lost_leases = models.IntegerField(default=0)
    """Number of attempts whose process stopped renewing the lease."""
    lease_owner = models.CharField(max_length=64, blank=True, default="")
    lease_until = models.DateTimeField(null=True, blank=True)
    fence = models.BigIntegerField(default=0)

    class Meta:
        abstract = True

    def end_lease(self) -> None:
        """Clear the owner; the caller saves the row."""
        self.lease_owner, self.lease_until = "", None


L = TypeVar("L", bound=LeasedRow)


def claim(
    rows: "QuerySet[L]", owner: str, *, now: datetime, lease: float, limit: int | None = None
) -> list[L]:
    """Lease up to `limit` unlocked rows to `owner`, each with a new attempt number. Return the rows.

    `lease` is in seconds. The caller saves `LEASE_COLUMNS`.
    """
    claimed = lock_free(rows, limit=limit)
    for row in claimed:
        row.lease_owner, row.lease_until = owner, now + timedelta(seconds=lease)
        row.fence += 1
    return claimed


def renew(
    leased: "QuerySet[L]", owner: str, ids: Sequence[UUID], *, now: datetime, lease: float
) -> dict[UUID, int]:
    """Extend the leases of `owner` on the rows `ids`; return the ids of rows still owned, with their fences.

    Pass only the ids of running attempts, so that all other leases expire. A locked row, whose progress or
    outcome is being written, is skipped: otherwise one blocked row would cost all others their leases.
    `owner` keeps the skipped row, because `lock_expired_rows` skips locked rows too.
    """
    mine = leased.filter(pk__in=as_array(ids), lease_owner=owner)
    free = mine.select_for_update(no_key=True, skip_locked=True).values("pk")
    with transaction.atomic(savepoint=False):
        leased.filter(pk__in=free).update(lease_until=now + timedelta(seconds=lease))
    return dict(mine.values_list("id", "fence"))


def lock_owned_rows(leased: "QuerySet[L]", owner: str) -> list[L]:
    """Lock and return the rows of `owner`, a process that is stopping, in the order of their ids."""
    return list(leased.filter(lease_owner=owner).order_by("pk").select_for_update(no_key=True))


def any_expired(leased: "QuerySet[L]", *, now: datetime) -> bool:
    """Return True if a lease has expired: one query without a lock, because usually none has."""
    return _expired_rows(leased, now).exists()


def _expired_rows(leased: "QuerySet[L]", now: datetime) -> "QuerySet[L]":
    return leased.filter(lease_until__lt=now)


def lock_expired_rows(leased: "QuerySet[L]", *, now: datetime) -> tuple[list[L], list[L]]:
    """Lock the rows with expired leases; return the rows to retry and the rows to give up.

    Locked rows are skipped. Each row to retry counts one more lost lease.
    """
    lost = lock_free(_expired_rows(leased, now).order_by("pk"))
    retried = [row for row in lost if row.lost_leases < MAX_LOST_LEASES]
    given_up = [row for row in lost if row.lost_leases >= MAX_LOST_LEASES]
    for row in retried:
        row.lost_leases += 1
    return retried, given_up


def lock_attempt_rows(leased: "QuerySet[L]", attempts: Collection[Attempt]) -> dict[UUID, L]:
    """Lock the rows that these attempts still own, in the order of their ids; return the rows by id."""
    named = leased.filter(pk__in={id for id, _ in attempts}).order_by("pk")
    return {row.id: row for row in named.select_for_update(no_key=True) if (row.id, row.fence) in attempts}


def confirm(leased: "QuerySet[L]", attempt: Attempt) -> None:
    """Check that the attempt still owns its row, without a lock. Raise LeaseLost if it does not."""
    if not leased.filter(pk=attempt[0], fence=attempt[1]).exists():
        raise LeaseLost(str(attempt[0]))
