"""The one way to commit in the rooms whose crashes are tested point by point (`points.py`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from django.db import connection, transaction

from localai_cluster import points

_inside: ContextVar[bool] = ContextVar("inside", default=False)


def committed(point: str) -> AbstractContextManager[None]:
    """A transaction, or a step of the caller's.

    One that is no step passes `:before` when everything is written, and `:committed` before anybody is told.
    One that has written nothing passes neither.
    """
    return _with_points(point) if points.armed() else transaction.atomic()


@contextmanager
def _with_points(point: str) -> Iterator[None]:
    if _inside.get():
        with transaction.atomic():
            yield
        return
    token, wrote = _inside.set(True), False

    def tell() -> None:
        if wrote:
            points.passed(f"{point}:committed")

    try:
        with transaction.atomic():
            transaction.on_commit(tell)  # the first of the hooks: the others send the news
            yield
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
                (wrote,) = cursor.fetchone()
            if wrote:
                points.passed(f"{point}:before")
    finally:
        _inside.reset(token)
