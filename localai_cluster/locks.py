"""Numbered try-locks for work that only one process may do at a time.

They are PostgreSQL advisory locks bound to a transaction: a crash releases them, losing returns at once. Only
who makes the schema waits (R1.9). The numbers are the reference's (`contract/scheduling.md` §0), so both can
share a database without meeting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from django.db import connection, transaction


class Lock(IntEnum):
    """Who may run alone."""

    LIVENESS = 104
    SCHEMA = 105
    OPERATION_REAPER = 0x1_0000_0001
    SCHEDULES = 0x1_0000_0002
    DRAINS = 0x1_0000_0003
    TIMELINE = 0x1_0000_0004


@contextmanager
def try_lock(lock: Lock) -> Iterator[bool]:
    """Opens a transaction and tries to take `lock` for its duration; yields whether this caller has it."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [int(lock)])
        (taken,) = cursor.fetchone()
        yield bool(taken)


@contextmanager
def wait_for_lock(lock: Lock) -> Iterator[None]:
    """Holds `lock` on this connection across transactions; waits until whoever has it is done or dead."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [int(lock)])
        try:
            yield
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [int(lock)])
