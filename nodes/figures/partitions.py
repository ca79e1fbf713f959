"""Tables partitioned by time: creating partitions in advance, listing them and dropping them.

Retention drops whole partitions, so no row is deleted and no vacuum is needed. Attaching a new partition
waits neither for readers nor for a running backup. Dropping a partition needs an exclusive lock on the
parent. Both give up after two seconds without a lock; the next run tries again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import OperationalError, connection, transaction

from localai_cluster.kit.transactions import limit_lock_wait, lock_name
from nodes.figures.series import floor_to_step

LOCK_WAIT_SECONDS = 2.0
"""Seconds that a statement waits for a lock.

A process that freezes with the lock must not stop the others: web processes create partitions between two of
their own heartbeats.
"""
_NAME_TIME_FORMAT = "%Y%m%d%H"
_LIST_PARTITIONS_SQL = (
    "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass ORDER BY 1"
)
# Not `to_regclass`: its cache does not learn of a table that another process has created a moment ago.
_FIND_MISSING_SQL = """
SELECT name FROM unnest(%s::text[]) AS name WHERE NOT EXISTS (
    SELECT FROM pg_class WHERE relname = name AND relnamespace = current_schema()::regnamespace)
"""


@dataclass(frozen=True)
class PartitionedTable:
    """A table partitioned by its column `at`.

    Each partition covers the time `width`. The name of a partition ends with its start time.
    """

    name: str
    width: timedelta
    kept: timedelta
    """Age at which a partition may be dropped."""

    def partition(self, at: datetime) -> str:
        """Return the name of the partition for this time."""
        return f"{self.name}_{floor_to_step(at, self.width):{_NAME_TIME_FORMAT}}"

    def starts(self) -> list[datetime]:
        """Return the start times of all partitions, the oldest first."""
        with connection.cursor() as cursor:
            cursor.execute(_LIST_PARTITIONS_SQL, [self.name])
            stamps = [name.rpartition("_")[2] for (name,) in cursor.fetchall()]
        return [datetime.strptime(stamp, _NAME_TIME_FORMAT).replace(tzinfo=UTC) for stamp in stamps]

    def drop(self, *, before: datetime) -> int:
        """Drop the partitions that end at `before` or earlier; return their number."""
        old = [start for start in self.starts() if start + self.width <= before]
        for dropped, start in enumerate(old):
            try:
                with transaction.atomic(), connection.cursor() as cursor:
                    limit_lock_wait(LOCK_WAIT_SECONDS)
                    cursor.execute(f"DROP TABLE IF EXISTS {self.partition(start)}")
            except OperationalError:  # a backup reads it
                return dropped
        return len(old)

    def _create(self, at: datetime) -> None:
        name, start = self.partition(at), floor_to_step(at, self.width)
        with transaction.atomic(), connection.cursor() as cursor:
            limit_lock_wait(LOCK_WAIT_SECONDS)
            lock_name("partitions")
            cursor.execute(_FIND_MISSING_SQL, [[name]])
            if cursor.fetchone() is None:
                return  # another process was first
            cursor.execute(f"CREATE TABLE {name} (LIKE {self.name} INCLUDING ALL)")
            bounds = f"FROM ('{start.isoformat()}') TO ('{(start + self.width).isoformat()}')"
            cursor.execute(f"ALTER TABLE {self.name} ATTACH PARTITION {name} FOR VALUES {bounds}")


def create_missing(wanted: Iterable[tuple[PartitionedTable, datetime]]) -> None:
    """Create the missing partitions for these tables and times. One query if none is missing.

    Raise OperationalError if another process holds the lock for too long.
    """
    partitions = {table.partition(at): (table, at) for table, at in wanted}
    with connection.cursor() as cursor:
        cursor.execute(_FIND_MISSING_SQL, [list(partitions)])
        missing = [name for (name,) in cursor.fetchall()]
    for name in missing:
        table, at = partitions[name]
        table._create(at)
