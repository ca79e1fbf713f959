"""The tables of figures: their only writer, and their reader.

Three tables hold the same figures at different steps: `figure_samples` has a row for each subject and ten
seconds, `figure_hours` a packed row of minutes for each subject and hour, `figure_days` a packed row of hours
for each subject and day. A task samples the rows of all nodes in one statement; web processes add their
counts for models. A later task packs each ended period in short transactions, in the order of subjects. The
last packed subject of a period determines where the next transaction continues, so a kill or a second process
neither repeats nor omits a subject. All times are the server's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any

import orjson
from django.db import connection, transaction
from psycopg.errors import CheckViolation

from localai_cluster.kit import clock
from localai_cluster.kit.database_pool import Pool
from localai_cluster.kit.transactions import Lock, try_lock_across
from localai_cluster.metrics.web import ModelCounts
from nodes.figures import partitions, series
from nodes.figures.partitions import PartitionedTable
from nodes.figures.series import DAY, HOUR, MINUTE, SAMPLE_EVERY, Columns, Grid, floor_to_step
from operations.executor.work import in_thread

SAMPLES_TABLE = PartitionedTable("figure_samples", HOUR, kept=HOUR)
HOURS_TABLE = PartitionedTable("figure_hours", DAY, kept=2 * DAY)
DAYS_TABLE = PartitionedTable("figure_days", 32 * DAY, kept=365 * DAY)
TABLES = (SAMPLES_TABLE, HOURS_TABLE, DAYS_TABLE)
LATE_SAMPLES_GRACE = 2 * MINUTE
"""Time after the end of a period for which late samples are awaited before it is packed."""
MAX_RETENTION = DAY
"""Age at which partitions are dropped even if they are not packed."""
SUBJECTS_PER_TRANSACTION = 50
"""Maximum number of subjects that one transaction packs, about 20 MB of samples."""
_MAX_INTEGER = 2**31 - 1

SqlParameters = dict[str, Any]
"""Parameters of a SQL statement by name."""


def _integer(value: str) -> str:
    """Return SQL that limits a number to the largest integer; NULL stays NULL.

    A wrong sensor value must not make the samples of all nodes fail. LEAST would turn NULL into the largest.
    """
    return f"(CASE WHEN {value} > {_MAX_INTEGER} THEN {_MAX_INTEGER} ELSE {value} END)::int"


def _mib(value: str) -> str:
    return _integer(f"(({value}) >> 20)")


def _sum(value: str) -> str:
    return _integer(f"sum({value})")


_VRAM_LIMIT = "CASE WHEN vram_budget_bytes > 0 THEN LEAST(vram_budget_bytes, total_vram) ELSE total_vram END"
_GPUS = """jsonb_to_recordset(gpus)
    AS gpu(index int, total_vram bigint, free_vram bigint, utilization int, temperature int, power int)"""
_SAMPLE_SQL = f"""
WITH node AS (
    SELECT id, gpus,
        {_mib(f"CASE WHEN total_vram > 0 THEN GREATEST(0, {_VRAM_LIMIT} - available_vram) END")} AS vram_used,
        {_mib("CASE WHEN total_ram > 0 THEN GREATEST(0, total_ram - available_ram) END")} AS ram_used,
        {_mib("CASE WHEN total_disk > 0 THEN GREATEST(0, total_disk - available_disk) END")} AS disk_used,
        {_mib(_VRAM_LIMIT)} AS vram, {_mib("total_ram")} AS ram, {_mib("total_disk")} AS disk
    FROM backend_nodes WHERE status NOT IN ('pending', 'offline') AND last_heartbeat > %(heard_since)s
), gpus AS (
    SELECT count(*)::int AS number, avg(utilization)::int AS busy, {_sum("power")} AS power FROM node, {_GPUS}
)
INSERT INTO figure_samples (subject, at, numbers)
SELECT 'node/' || id, %(at)s::timestamptz, ARRAY[vram_used, ram_used, disk_used] || ARRAY(
    SELECT number
    FROM {_GPUS}, unnest(ARRAY[index, {_mib("GREATEST(0, total_vram - free_vram)")},
        utilization, temperature, power]) WITH ORDINALITY AS numbers(number, place)
    ORDER BY index, place)
FROM node
UNION ALL
SELECT 'cluster', %(at)s::timestamptz, ARRAY[count(*)::int, min(gpus.number), min(gpus.busy),
    {_sum("vram_used")}, {_sum("vram")}, {_sum("ram_used")}, {_sum("ram")},
    {_sum("disk_used")}, {_sum("disk")}, min(gpus.power)]
FROM gpus LEFT JOIN node ON TRUE
ON CONFLICT DO NOTHING
"""
# In the order of subjects: two processes that add to the same rows never deadlock.
_ADD_COUNTS_SQL = f"""
INSERT INTO figure_samples (subject, at, numbers)
SELECT subject, %(at)s, numbers
FROM jsonb_to_recordset(%(counts)s::jsonb) AS counted(subject text, numbers int[]) ORDER BY subject
ON CONFLICT (subject, at) DO UPDATE SET numbers = ARRAY(
    SELECT LEAST(stored::bigint + added, {_MAX_INTEGER})::int
    FROM unnest(figure_samples.numbers, excluded.numbers) WITH ORDINALITY AS pair(stored, added, place)
    ORDER BY place)
"""


def create_partitions(now: datetime) -> None:
    """Create the missing partitions for now and for the next period.

    Raise OperationalError if another process holds the lock for too long.
    """
    partitions.create_missing((table, at) for table in TABLES for at in (now, now + table.width))


def store_samples(*, heard_since: datetime, now: datetime) -> int:
    """Store a sample of the cluster and of each node with a heartbeat since `heard_since`. Return the number.

    Create the partitions for now and for the next period. A repeated call changes nothing.
    """
    create_partitions(now)
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLE_SQL, {"at": floor_to_step(now, SAMPLE_EVERY), "heard_since": heard_since})
        stored: int = cursor.rowcount
    return stored


async def add_counts(pool: Pool, counts: Mapping[str, ModelCounts], *, now: datetime) -> None:
    """Add a web process's counts for its models, and their sums, in one statement.

    Do not repeat it after a lost reply: the statement may have been executed. Create the partition if it is
    missing: `migrate` and the sampling task create it in advance, but the task may not run, or its clock is
    behind.
    Raise CheckViolation, with nothing stored, if the partition is missing because its period is over.
    """
    numbers = {
        name: [min(number, _MAX_INTEGER) for number in astuple(count)] for name, count in counts.items()
    }
    rows = [{"subject": series.MODEL_PREFIX + name, "numbers": row} for name, row in numbers.items() if name]
    sums = [min(sum(column), _MAX_INTEGER) for column in zip(*numbers.values(), strict=True)]
    if sums:
        rows.append({"subject": series.ALL_MODELS_SUBJECT, "numbers": sums})
        parameters = {"at": floor_to_step(now, SAMPLE_EVERY), "counts": orjson.dumps(rows).decode()}
        try:
            await pool.run(_ADD_COUNTS_SQL, parameters)
        except CheckViolation:  # no partition, so nothing was stored
            if not await in_thread(_create_samples_partition, now):
                raise
            await pool.run(_ADD_COUNTS_SQL, parameters)


def _create_samples_partition(at: datetime) -> bool:
    """Create the partition of samples for this time. Return False if a later period has begun.

    The time is from the clock of a web process, which may be hours behind. Its figures would not be packed
    any more, and each run of `maintain` would drop the partition again.
    """
    # The sampling task creates the partitions of now and of the next period.
    next_start = max(SAMPLES_TABLE.starts(), default=at)
    if next_start > floor_to_step(at, SAMPLES_TABLE.width) + SAMPLES_TABLE.width:
        return False
    partitions.create_missing([(SAMPLES_TABLE, at)])
    return True


@dataclass(frozen=True)
class RollUp:
    """Packs each partition of `source` into blocks of `target` with the step `step`."""

    source: PartitionedTable
    target: PartitionedTable
    step: timedelta

    @property
    def period(self) -> timedelta:
        """Time that one block covers."""
        return self.source.width

    def pack_next(self, start: datetime) -> bool:
        """Pack the next subjects of the period that begins at `start`, in one transaction.

        Return False if no subject is left.
        """
        with transaction.atomic(), connection.cursor() as cursor:
            names = {"source": self.source.name, "target": self.target.name}
            scope: SqlParameters = {
                "start": start,
                "end": start + self.period,
                "limit": SUBJECTS_PER_TRANSACTION,
            }
            cursor.execute(_NEXT_SUBJECTS_SQL.format(**names), scope)
            subjects = [subject for (subject,) in cursor.fetchall()]
            if subjects:
                column = "numbers" if self.source is SAMPLES_TABLE else "body"
                cursor.execute(
                    _READ_ROWS_SQL.format(column=column, table=self.source.name),
                    scope | {"subjects": subjects},
                )
                blocks = self._blocks(start, cursor.fetchall())
                cursor.execute(
                    _INSERT_BLOCKS_SQL.format(**names), [start, list(blocks), list(blocks.values())]
                )
        return bool(subjects)

    def _blocks(self, start: datetime, rows: Sequence[tuple[str, datetime, Any]]) -> dict[str, bytes]:
        grids: dict[str, Grid] = {}
        for subject, at, value in rows:
            grid = grids.get(subject)
            if grid is None:
                grid = grids[subject] = Grid(start, self.step, self.period // self.step)
            if self.source is SAMPLES_TABLE:
                grid.add_sample(at, subject, value)
            else:
                grid.add_block(at, MINUTE, series.unpack(value))
        return {subject: series.pack(grid.columns()) for subject, grid in grids.items()}


ROLL_UPS = (RollUp(SAMPLES_TABLE, HOURS_TABLE, MINUTE), RollUp(HOURS_TABLE, DAYS_TABLE, HOUR))
_NEXT_SUBJECTS_SQL = """
SELECT DISTINCT subject FROM {source} WHERE at >= %(start)s AND at < %(end)s
    AND subject > coalesce((SELECT max(subject) FROM {target} WHERE at = %(start)s), '')
ORDER BY subject LIMIT %(limit)s
"""
_READ_ROWS_SQL = """
SELECT subject, at, {column} FROM {table}
WHERE at >= %(start)s AND at < %(end)s AND subject = ANY(%(subjects)s)
"""
_INSERT_BLOCKS_SQL = """
INSERT INTO {target} (subject, at, body)
SELECT subject, %s, body FROM unnest(%s::text[], %s::bytea[]) AS block(subject, body) ON CONFLICT DO NOTHING
"""


def maintain(*, now: datetime, limit: float) -> bool:
    """Pack the periods that have ended, then drop old partitions. Return True if all are packed.

    Packing stops after `limit` seconds. Return False at once if another process holds the lock.
    """
    with try_lock_across(Lock.FIGURES) as locked:
        if not locked:
            return False
        is_packed = _pack_until(now, clock.monotonic() + limit)
        for table in TABLES:
            table.drop(before=now - (table.kept if is_packed else max(table.kept, MAX_RETENTION)))
    return is_packed


def _pack_until(now: datetime, deadline: float) -> bool:
    """Pack the hours, then the days that have ended. Return False if the deadline passes before the end."""
    for level in ROLL_UPS:
        for start in level.source.starts():
            if start + level.period + LATE_SAMPLES_GRACE > now:
                continue
            partitions.create_missing([(level.target, start)])
            while level.pack_next(start):
                if clock.monotonic() >= deadline:
                    return False
    return True


@dataclass(frozen=True)
class Span:
    """A time range as `count` steps from `start`."""

    start: datetime
    step: timedelta
    count: int

    @property
    def end(self) -> datetime:
        """Time when the last step ends."""
        return self.start + self.count * self.step


def read(subjects: Sequence[str], span: Span) -> dict[str, Columns]:
    """Return the columns of each subject for the span, with at most three queries.

    The coarsest table with the step is read first, and finer tables for periods that are not packed yet.
    """
    grids = {subject: Grid(span.start, span.step, span.count) for subject in subjects}
    packed: set[tuple[str, datetime, timedelta]] = set()

    def is_packed(subject: str, at: datetime) -> bool:
        return any((subject, floor_to_step(at, level.period), level.period) in packed for level in ROLL_UPS)

    for level in reversed(ROLL_UPS):
        if span.step >= level.step:
            first = floor_to_step(span.start, level.period)
            blocks = _read_rows("body", level.target, subjects, first, span.end)
            for subject, at, body in blocks:
                if not is_packed(subject, at):
                    grids[subject].add_block(at, level.step, series.unpack(body))
                    packed.add((subject, at, level.period))
    for subject, at, numbers in _read_rows("numbers", SAMPLES_TABLE, subjects, span.start, span.end):
        if not is_packed(subject, at):
            grids[subject].add_sample(at, subject, numbers)
    return {subject: grid.columns() for subject, grid in grids.items()}


def _read_rows(
    column: str, table: PartitionedTable, subjects: Sequence[str], start: datetime, end: datetime
) -> list[tuple[str, datetime, Any]]:
    with connection.cursor() as cursor:
        scope: SqlParameters = {"start": start, "end": end, "subjects": list(subjects)}
        cursor.execute(_READ_ROWS_SQL.format(column=column, table=table.name), scope)
        rows: list[tuple[str, datetime, Any]] = cursor.fetchall()
    return rows
