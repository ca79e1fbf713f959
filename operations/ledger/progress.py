"""Progress of running operations: the columns that a report changes, and batched writes of reports.

`record` writes the reports of any number of attempts in one transaction, with a constant number of
statements, and takes one range of the change counter. If an attempt has lost its operation, its report
changes nothing and `record` returns the attempt; all other reports are written.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self
from uuid import UUID

from localai_cluster.kit.commit_hooks import committed
from localai_cluster.kit.leases import Attempt, update_rows
from localai_cluster.kit.locks import limit_lock_wait
from operations import targets
from operations.changes.events import emit
from operations.models import Operation, OperationTarget, Status, TargetStatus, storable

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
    """Number of files that are sent to the node. Their bytes are counted from the first report about them."""
    bytes_per_second: int = 0
    progress_at: datetime | None = None
    """Time of the last progress; None = the time of this report."""
    time_limit_at: datetime | None = None
    """Time at which the step times out."""

    def after(self, earlier: Self) -> Self:
        """Merge this report into an earlier one. A late report does not lower a figure (O69)."""
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
    """Apply the last reports of an attempt to its operation, which the caller saves."""
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
            _apply_to_operation(operation, tick)
        if tick.node_id is not None and not parts:
            operation.node_id, operation.node_name = tick.node_id, storable(tick.node_name, 255)
    if len(parts) > 1:
        targets.aggregate_progress(operation, parts)
    return list(moved.values())


def _apply_to_operation(operation: Operation, tick: Tick) -> None:
    operation.message = storable(tick.message) or operation.message
    reached = 0 if tick.total_files and not operation.total_files else operation.current_bytes
    operation.current_bytes = max(tick.current_bytes, reached)
    operation.total_bytes = tick.total_bytes or operation.total_bytes
    operation.total_files = tick.total_files or operation.total_files
    operation.file_index = max(tick.file_index, operation.file_index)
    operation.bytes_per_second = tick.bytes_per_second
    targets.raise_progress(operation, tick.percentage)


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
