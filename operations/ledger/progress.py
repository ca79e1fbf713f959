"""Progress of running operations: the columns that a report changes, and batched writes of reports.

`record` writes the reports of any number of attempts in one transaction, with a constant number of
statements, and takes one range of the change counter. If an attempt has lost its operation, its report
changes nothing and `record` returns the attempt; all other reports are written. A `Recorder` collects the
reports of an executor for `record`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

from localai_cluster.kit.batching import Batcher
from localai_cluster.kit.leases import Attempt, update_rows
from localai_cluster.kit.transactions import committed, limit_lock_wait
from operations import targets
from operations.changes.events import emit
from operations.models import Operation, OperationTarget, Status, TargetStatus, storable

log = logging.getLogger(__name__)

REPORT_COLUMNS = [
    "phase", "message", "current_bytes", "total_bytes", "progress", "updated_at", "node_id", "node_name",
    "file_index", "total_files", "bytes_per_second", "last_progress_at", "time_limit_at",
]  # fmt: skip
_TARGET_COLUMNS = [
    "status", "phase", "percentage", "file_name", "current_bytes", "total_bytes",
    "last_progress_at", "time_limit_at",
]  # fmt: skip
BATCH_LOCK_TIMEOUT = 0.5
"""Maximum seconds that a batch waits for a row or for the change counter.

A waiting batch locks the rows of many operations, whose outcomes and leases must not wait for progress.
"""


@dataclass(frozen=True)
class Tick:
    """One progress report. Bytes and percentage never decrease within an attempt (I6)."""

    phase: str = ""
    message: str = ""
    current_bytes: int = 0
    total_bytes: int = 0
    percentage: float = 0.0
    file_name: str = ""
    node_id: UUID | None = None
    node_name: str = ""
    file_index: int = 0
    total_files: int = 0
    """Number of files that are sent to the node; bytes are counted over all of them."""
    bytes_per_second: int = 0
    progress_at: datetime | None = None
    """Time at which progress was last made; None = the time of this report."""
    time_limit_at: datetime | None = None
    """Time at which the current step times out."""

    def after(self, earlier: Self) -> Self:
        """Return this report merged with an earlier one. A late report does not lower a figure (O69)."""
        same_file = (self.file_name, self.total_files) == (earlier.file_name, earlier.total_files)
        return replace(
            self,
            phase=self.phase or earlier.phase,
            message=self.message or earlier.message,
            current_bytes=max(self.current_bytes, earlier.current_bytes) if same_file else self.current_bytes,
            total_bytes=self.total_bytes or (earlier.total_bytes if same_file else 0),
            percentage=max(self.percentage, earlier.percentage),
            node_name=self.node_name or earlier.node_name,
        )


def record(
    reports: Mapping[Attempt, Collection[Tick]], *, now: datetime, lock_timeout: float = 0
) -> set[Attempt]:
    """Write the reports of many attempts. Return the attempts that have lost their operation.

    Raises OperationalError if a lock takes longer than `lock_timeout` seconds; 0 = no limit.
    """
    with committed("ledger.progress"):
        limit_lock_wait(lock_timeout)
        named = Operation.objects.filter(pk__in={id for id, _ in reports}, status=Status.PROCESSING)
        rows = {(row.id, row.fence): row for row in named.select_for_update(no_key=True).order_by("pk")}
        mine = [rows[attempt] for attempt in reports if attempt in rows]
        parts = targets.of(mine)
        moved: list[OperationTarget] = []
        for operation in mine:
            ticks = reports[operation.id, operation.fence]
            moved += _apply_reports(operation, parts.get(operation.id, ()), ticks, now)
            operation.updated_at = now
        update_rows(mine, REPORT_COLUMNS)
        update_rows(moved, _TARGET_COLUMNS)
        emit(mine, parts, moved)
    return reports.keys() - rows.keys()


def apply_last_reports(operation: Operation, ticks: Collection[Tick], now: datetime) -> None:
    """Apply the unwritten reports of an ended attempt to its operation, which the caller saves."""
    if not ticks:
        return
    update_rows(
        _apply_reports(operation, targets.of([operation]).get(operation.id, ()), ticks, now), _TARGET_COLUMNS
    )


def _apply_reports(
    operation: Operation, parts: Sequence[OperationTarget], ticks: Collection[Tick], now: datetime
) -> list[OperationTarget]:
    """Apply the reports to their targets, and aggregate the targets in the operation.

    A target that has ended does not change. Returns the changed targets.
    """
    moved: dict[UUID, OperationTarget] = {}
    running = {part.node_id: part for part in parts if part.status not in targets.ENDED}
    for tick in ticks:
        operation.phase = storable(tick.phase, 32) or operation.phase
        operation.last_progress_at, operation.time_limit_at = tick.progress_at or now, tick.time_limit_at
        if tick.node_id in running:
            part = moved[tick.node_id] = running[tick.node_id]
            apply_to_target(part, tick, now)
            part.time_limit_at = tick.time_limit_at
        if len(parts) <= 1:
            operation.message = storable(tick.message) or operation.message
            reached = 0 if tick.total_files and not operation.total_files else operation.current_bytes
            operation.current_bytes = max(tick.current_bytes, reached)
            operation.total_bytes = tick.total_bytes or operation.total_bytes
            operation.total_files = tick.total_files or operation.total_files
            operation.file_index = max(tick.file_index, operation.file_index)
            operation.bytes_per_second = tick.bytes_per_second
            targets.raise_progress(operation, tick.percentage)
        if tick.node_id is not None and not parts:
            operation.node_id, operation.node_name = tick.node_id, storable(tick.node_name, 255)
    if len(parts) > 1:
        targets.aggregate_progress(operation, parts)
    return list(moved.values())


def apply_to_target(part: OperationTarget, tick: Tick, now: datetime) -> None:
    """Apply a report to one target."""
    part.last_progress_at = tick.progress_at or now
    part.status = TargetStatus.DOWNLOADING if tick.total_bytes else TargetStatus.RUNNING_ON_WORKER
    part.phase = storable(tick.phase, 32)
    # O69: reports may come out of order.
    part.percentage = min(max(tick.percentage, part.percentage), 100.0)
    file_name = storable(tick.file_name, 512)
    reached = part.current_bytes if part.file_name == file_name else 0
    part.file_name, part.current_bytes = file_name, max(tick.current_bytes, reached)
    part.total_bytes = tick.total_bytes


BATCH_INTERVAL = 0.1
"""Minimum seconds between the starts of two batches. The interval is twice the duration of the last batch."""
SLOW_BATCH_INTERVAL = 0.2
"""Seconds between the starts of two batches if the last batch took longer than half of it."""
WRITE_TIMEOUT = 5.0
_UNREACHABLE = (OperationalError, InterfaceError, TimeoutError)

Batch = Mapping[Attempt, Collection[Tick]]


class Recorder(Batcher[Attempt, list[Tick]]):
    """Buffers the progress reports of running attempts and writes them in batches, one recorder per executor.

    It keeps the latest report of each target, and writes at once if no write is running. It starts at most
    ten batches a second, five if they are slow, because outcomes and leases need the same rows. A batch that
    cannot be written is retried, merged with newer reports. A crash loses unwritten reports, never an
    outcome, with which the unwritten reports of its attempt are written (`take`). `write` returns the
    attempts that have lost their operation.
    """

    def __init__(
        self,
        write: Callable[[Batch], Awaitable[set[Attempt]]],
        lost: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        self._write_reports, self._lost = write, lost
        super().__init__(
            self._write_or_split,
            merge=_merge,
            interval=(BATCH_INTERVAL, SLOW_BATCH_INTERVAL),
            retry_on=_UNREACHABLE,
        )

    async def _write_or_split(self, batch: Mapping[Attempt, list[Tick]]) -> Mapping[Attempt, list[Tick]]:
        """Write a batch; if a report is refused, write the reports of each attempt separately.

        So a refused report blocks no other. Return the reports to write again.
        """
        left = {}
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                for attempt in await self._write_reports(batch):
                    self._lost(attempt)
        except _UNREACHABLE:
            raise
        except DatabaseError as refusal:
            if len(batch) == 1:
                log.warning("a report of operation %s cannot be written: %s", next(iter(batch))[0], refusal)
                return {}
            for attempt, ticks in batch.items():
                try:
                    await self._write_or_split({attempt: ticks})
                except _UNREACHABLE:
                    left[attempt] = ticks
        return left


def _merge(earlier_ticks: list[Tick], later_ticks: list[Tick]) -> list[Tick]:
    """Merge the reports of one attempt, in order, to at most two per node.

    A report without bytes does not replace the figures of the last report with bytes; it follows that report.
    """
    merged: dict[tuple[UUID | None, bool], Tick] = {}
    for tick in (*earlier_ticks, *later_ticks):
        key = (tick.node_id, tick.total_bytes > 0)
        earlier = merged.pop(key, None)
        merged[key] = tick.after(earlier) if earlier else tick
    return list(merged.values())
