"""Transactions of packages whose crashes are tested (`failpoints.py`), and the locks that transactions hold.

Locks are PostgreSQL advisory locks bound to a transaction or to a connection: a crash releases them, and a
try-lock returns at once. Only migrations (R1.9) and locks by name block. The numbers follow the reference's
(`contract/scheduling.md` §0), so both can share a database without conflicts.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import IntEnum

from django.db import connection, transaction

from localai_cluster.kit import failpoints

_inside: ContextVar[bool] = ContextVar("inside", default=False)


def committed(point: str) -> AbstractContextManager[None]:
    """Open a transaction, or a savepoint within the caller's transaction.

    An outermost transaction that writes passes two failpoints: `<point>:before` before its commit, and
    `<point>:committed` before any other commit hook. A transaction that writes nothing passes no failpoint.
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


_NAMED_LOCKS = 1
"""First key of locks by name, which have two keys. They never conflict with locks that have one key."""


class Lock(IntEnum):
    """Keys of the locks: one for each kind of exclusive work."""

    REPLICAS = 465212274928412116
    """Key of the reference's `replica-reconciler` (R4.2)."""
    LIVENESS = 104
    SCHEMA = 105
    UPGRADE_CHECK = 106
    STATE_PASS = 107
    OPERATION_REAPER = 0x1_0000_0001
    SCHEDULES = 0x1_0000_0002
    DRAINS = 0x1_0000_0003
    TIMELINE = 0x1_0000_0004
    INTENT_REAPER = 0x1_0000_0005
    STALE_INTENTS = 0x1_0000_0006
    FIGURES = 0x1_0000_0007


@contextmanager
def try_lock(lock: Lock) -> Iterator[bool]:
    """Open a transaction and try to take `lock` for its duration; yield True if this caller holds it."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [int(lock)])
        (has_lock,) = cursor.fetchone()
        yield bool(has_lock)


@contextmanager
def try_lock_across(lock: Lock) -> Iterator[bool]:
    """Try to take `lock` on this connection, across transactions; yield True if this caller holds it.

    This is for work in many short transactions, since one long transaction would hold its row locks for too
    long. A lost connection ends the work and the lock together.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [int(lock)])
        (has_lock,) = cursor.fetchone()
    try:
        yield bool(has_lock)
    finally:
        if has_lock:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [int(lock)])


def limit_lock_wait(seconds: float) -> None:
    """Limit the seconds that each statement of this transaction waits for a lock; 0 = no limit."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{round(1000 * seconds)}ms"])


def lock_name(name: str) -> None:
    """Lock this name for the current transaction; wait until no other transaction holds the lock.

    Two names with equal hashes share a lock, which only costs a wait.
    """
    lock_names([name])


def lock_names(names: Collection[str]) -> None:
    """Lock these names as `lock_name` does, in the order of their hashes, by one statement."""
    if not names:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_advisory_xact_lock(%s, hash) FROM"
            " (SELECT DISTINCT hashtext(name) AS hash FROM unnest(%s::text[]) AS name ORDER BY hash) h",
            [_NAMED_LOCKS, list(names)],
        )


def release_connection() -> None:
    """Close this thread's database connection before a wait; keep it within a transaction.

    There are fewer connections than requests. The next statement opens another one.
    """
    if not connection.in_atomic_block:
        connection.close()


@contextmanager
def wait_for_lock(lock: Lock) -> Iterator[None]:
    """Hold `lock` on this connection across transactions; wait until its former holder releases it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [int(lock)])
        try:
            yield
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [int(lock)])
