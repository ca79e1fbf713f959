"""Bounds by size of tables that keep decisions: as many of the newest rows as fit into some bytes."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import reduce
from operator import add
from typing import Any

from django.db.models import BigIntegerField, F, Func, QuerySet, Sum, Value, Window

_ROW = 300
"""Bytes of a row besides its large columns, with its entries in the indexes."""
_TICK = timedelta(microseconds=1)


def time_of_oldest_fitting(rows: QuerySet[Any], at: str, large: Sequence[str], space: int) -> datetime | None:
    """Return the time `at` from which on rows fit into `space` bytes; None if all do. One query.

    Of `large` columns the stored size counts, which is compressed. PostgreSQL knows it without reading them.
    """
    sizes = (Func(F(name), function="pg_column_size", output_field=BigIntegerField()) for name in large)
    size = reduce(add, sizes, Value(_ROW, output_field=BigIntegerField()))
    newest_first = (F(at).desc(), F("id").desc())
    added = rows.annotate(total=Window(Sum(size), order_by=newest_first))
    last: datetime | None = (
        added.filter(total__gt=space).order_by(*newest_first).values_list(at, flat=True).first()
    )
    return last + _TICK if last is not None else None
