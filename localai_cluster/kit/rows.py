"""Statements over many rows: claims that several processes make at once, and updates in bulk.

A claim is a column with the time until which a row belongs to one process. It is taken with `SKIP LOCKED`,
so no process waits for another, and expires by itself when a process dies.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

from django.db import connection, models, transaction
from django.db.models import F, QuerySet

M = TypeVar("M", bound=models.Model)


def lock_free(rows: "QuerySet[M]", *, limit: int | None = None) -> list[M]:
    """Lock up to `limit` of the rows that no other transaction locks, and return them. Needs a transaction.

    Locked rows are skipped, so the order of the locks does not matter.
    """
    return list(rows.select_for_update(no_key=True, skip_locked=True, of=("self",))[:limit])


def claim_rows(rows: "QuerySet[M]", *, limit: int | None = None, **changes: Any) -> list[M]:
    """Lock up to `limit` of the rows that no other transaction locks, write `changes`, and return them.

    The returned rows have their former values.
    """
    with transaction.atomic(savepoint=False):
        claimed = lock_free(rows, limit=limit)
        if claimed:
            rows.model._base_manager.filter(pk__in=[row.pk for row in claimed]).update(**changes)
    return claimed


def seconds_until_due(rows: "QuerySet[M]", column: str, *, now: datetime, at_most: float) -> float:
    """Return the seconds until the first of the rows is due; a row without a time is due."""
    first = list(rows.order_by(F(column).asc(nulls_first=True)).values_list(column, flat=True)[:1])
    if not first:
        return at_most
    return 0.0 if first[0] is None else min(max((first[0] - now).total_seconds(), 0.0), at_most)


def update_rows(rows: Sequence[models.Model], columns: Sequence[str]) -> None:
    """Write these columns of the rows: one UPDATE that joins arrays of values.

    Django's `bulk_update` writes a CASE with a branch for each row into each column: its cost grows with the
    square of the rows.
    """
    if not rows:
        return
    meta, quote = rows[0]._meta, connection.ops.quote_name
    fields = [field for field in meta.concrete_fields if field.primary_key or field.name in columns]
    names = [quote(field.column or field.name) for field in fields]
    arrays = ", ".join(f"%s::{field.db_type(connection)}[]" for field in fields)
    changes = ", ".join(f"{name} = v.{name}" for name in names)
    values = [
        [field.get_db_prep_save(getattr(row, field.attname), connection) for row in rows] for field in fields
    ]
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {quote(meta.db_table)} AS t SET {changes}"
            f" FROM unnest({arrays}) AS v ({', '.join(names)}) WHERE t.id = v.id",
            values,
        )
