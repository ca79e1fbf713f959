"""Transactions with failpoints, for the packages whose crashes are tested at each point (`failpoints.py`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from django.db import connection, transaction

from localai_cluster.kit import failpoints

_inside: ContextVar[bool] = ContextVar("inside", default=False)


def committed(point: str) -> AbstractContextManager[None]:
    """Open a transaction, or a savepoint within the caller's transaction.

    An outermost transaction that writes passes two failpoints: `:before` before its commit, and `:committed`
    before any other commit hook. A transaction that writes nothing passes neither.
    """
    return _with_points(point) if failpoints.armed() else transaction.atomic()


@contextmanager
def _with_points(point: str) -> Iterator[None]:
    if _inside.get():
        with transaction.atomic():
            yield
        return
    token, wrote = _inside.set(True), False

    def pass_committed() -> None:
        if wrote:
            failpoints.passed(f"{point}:committed")

    try:
        with transaction.atomic():
            transaction.on_commit(pass_committed)  # the first hook: the others publish the changes
            yield
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
                (wrote,) = cursor.fetchone()
            if wrote:
                failpoints.passed(f"{point}:before")
    finally:
        _inside.reset(token)
