"""Numbered try-locks for work that only one process may do at a time, and one line to stand in by name.

They are PostgreSQL advisory locks bound to a transaction, or to a connection: a crash releases them, losing
returns at once. Only who makes the schema waits (R1.9), and who stands in line. The numbers are the
reference's (`contract/scheduling.md` §0), so both can share a database without meeting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from django.db import connection, transaction

_LINES = 1
"""Locks of two numbers never meet those of one."""


class Lock(IntEnum):
    """Who may run alone."""

    REPLICAS = 465212274928412116
    """The reference's `replica-reconciler` (R4.2)."""
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


@contextmanager
def try_lock(lock: Lock) -> Iterator[bool]:
    """Open a transaction and try to take `lock` for its duration; yield whether this caller has it."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [int(lock)])
        (taken,) = cursor.fetchone()
        yield bool(taken)


@contextmanager
def try_lock_across(lock: Lock) -> Iterator[bool]:
    """Try to take `lock` on this connection, across transactions; yield whether this caller has it.

    For work of many short transactions, which one alone would keep locked for too long. A connection that is
    lost ends the work and the lock together.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [int(lock)])
        (taken,) = cursor.fetchone()
    try:
        yield bool(taken)
    finally:
        if taken:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [int(lock)])


def stand_in_line(name: str) -> None:
    """Wait until no other transaction that stands in this line is left; the place ends with the transaction.

    Names that share a hash share a line, which costs no more than a wait.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [_LINES, name])


@contextmanager
def wait_for_lock(lock: Lock) -> Iterator[None]:
    """Hold `lock` on this connection across transactions; wait until its holder is done or dead."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [int(lock)])
        try:
            yield
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [int(lock)])
