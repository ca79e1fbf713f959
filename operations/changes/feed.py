"""The feed of operations for browsers and clients: a snapshot, then changes by sequence number.

The dictionaries are the reference's (`contract/http-api.md` §3.2) plus our own fields. `since(n)` returns
every operation that changed after number n, in order; several changes of one operation between two reads
become one entry.

A partial change contains only the changed targets of an operation. It applies to readers that have all
earlier changes. So a change of one target has the size of one target, regardless of the number of nodes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from django.db import connection, transaction

from localai_cluster.kit.quantities import human_bytes
from localai_cluster.web.shapes import FLAG, PERCENT, TEXT, TEXTS, TIME, UUID, Row, Shape, count, enum, field
from operations import models
from operations.causes import cause_of
from operations.models import Operation, OperationTarget, Status, TargetStatus, TaskType, Waves, facts_of

_RESTING_STATUSES = (Status.PENDING, Status.WAITING)


@dataclass(frozen=True)
class Feed:
    """The operations as of change number `seq`."""

    seq: int
    operations: list[Row]


INTEGER_SCHEMA = {"type": "integer"}
_WAIT_FIELDS = (
    field("waitsFor", TEXT, "What it waits for at this moment.", optional=True),
    field("waitsSince", TIME, "Since when its node is not healthy.", optional=True),
    field(
        "queuePlace", count(1), "Its place in the queue of its node, or of the controllers.", optional=True
    ),
)
"""Fields of waiting work in lists and single operations, not in the live feed."""
_PROGRESS_FIELDS = (
    field("lastProgressAt", TIME, "While it runs: when something was last heard of it.", optional=True),
    field("timeLimitAt", TIME, "While it runs: when its step is given up as unanswered.", optional=True),
    field("startedAt", TIME, optional=True),
    field("finishedAt", TIME, optional=True),
)
CAUSE_FIELD = field(
    "cause",
    TEXT,
    "Of a failure: its error without what differs from node to node; failures with one cause share it.",
    optional=True,
)
TARGET_SHAPE = Shape(
    "OperationTarget",
    "One node's part of an operation.",
    [
        field("node_id", UUID),
        field("node_name", TEXT),
        field("status", enum("TargetStatus", TargetStatus).ref),
        field("percentage", PERCENT),
        field("file_name", TEXT, optional=True),
        field("phase", TEXT, optional=True),
        field("error", TEXT, optional=True),
        CAUSE_FIELD,
        field("dismissedAt", TIME, "Since when its failure is off the live list.", optional=True),
        field("current", TEXT, optional=True),
        field("total", TEXT, optional=True),
        field("current_bytes", INTEGER_SCHEMA, optional=True),
        field("total_bytes", INTEGER_SCHEMA, optional=True),
        field("reason", TEXT, "What it waits for, or what there is to say of its end.", optional=True),
        field("attempts", INTEGER_SCHEMA, "Attempts that failed.", optional=True),
        field("nextLookAt", TIME, optional=True),
        field(
            "overdueSince",
            TIME,
            "Since when its time limit is over; the worker may still be busy with it.",
            optional=True,
        ),
        field("wave", count(), "When its turn is, in an upgrade in waves; 0 = the canary.", optional=True),
        *_PROGRESS_FIELDS,
        *_WAIT_FIELDS,
    ],
)
WAVES_SHAPE = Shape(
    "Waves",
    "An upgrade in waves: the plan, how far it is, and what was chosen. Parts say in which wave they are.",
    [
        field(
            "state",
            enum("WavesStateEnum", Waves).ref,
            "`asks`: a wave failed; continue or stop (`…/waves`).",
        ),
        field("open", count(), "The wave that is carried out, or ended last."),
        field("count", count(), "How many waves there are."),
        field("maxUnavailable", count(1)),
        field("canary", FLAG),
        field("pauseSeconds", count(), "Pause between two waves.", optional=True),
        field("stopAtFailures", count(1), "It asks once this many nodes have failed.", optional=True),
        field("lastReplicas", TEXTS, "Models whose last replica may stop."),
    ],
)
OPERATION_FIELDS = (
    field("id", TEXT),
    field("name", TEXT),
    field("fullName", TEXT),
    field("jobID", UUID),
    field("kind", TEXT),
    field("status", enum("OperationStatus", Status).ref),
    field("progress", count(0, maximum=100)),
    field("taskType", {"type": "string", "enum": list(TaskType)}),
    field("isDeletion", FLAG),
    field("isBackend", FLAG),
    field("isQueued", FLAG),
    field("cancellable", FLAG),
    field("message", TEXT),
    field("attempts", INTEGER_SCHEMA),
    field("nextLookAt", TIME),
    field(
        "givesUpAt",
        TIME,
        "Until when it waits at the longest; only while it waits and has a limit.",
        optional=True,
    ),
    field("requestID", TEXT),
    field("actor", TEXT),
    field("seq", INTEGER_SCHEMA),
    field("createdAt", TIME),
    field("nodeID", UUID, optional=True),
    field("nodeName", TEXT, optional=True),
    field("phase", TEXT, optional=True),
    field("currentBytes", INTEGER_SCHEMA, optional=True),
    field("totalBytes", INTEGER_SCHEMA, optional=True),
    field("error", TEXT, optional=True),
    CAUSE_FIELD,
    field("dismissedAt", TIME, "When the failure was dismissed.", optional=True),
    field("dismissedBy", TEXT, optional=True),
    field("dismissedComment", TEXT, optional=True),
    field("allNodes", FLAG, "Requested for all nodes that could take it.", optional=True),
    field("clientAddress", TEXT, optional=True),
    field("waves", WAVES_SHAPE.ref, optional=True),
    field("nodes", TARGET_SHAPE.many, optional=True),
    *_PROGRESS_FIELDS,
    *_WAIT_FIELDS,
)
OPERATION_SHAPE = Shape(
    "Operation",
    "One operation (`contract/http-api.md` §3.2), with its kind, status, sequence and next look.",
    OPERATION_FIELDS,
)


def target_as_dict(target: OperationTarget, element: str = "") -> Row:
    """Return the target in wire form. A stock page reads the reason of a wait from `error` (§3.2).

    `element` is the name that is removed from the error text, so that equal causes have equal texts.
    """
    waits = target.status in (TargetStatus.QUEUED, TargetStatus.RUNNING_ON_WORKER)
    runs = target.status in (TargetStatus.DOWNLOADING, TargetStatus.RUNNING_ON_WORKER)
    has_explanation = target.waits_for_node or target.attempts or target.overdue_since
    row = TARGET_SHAPE.of(
        node_id=str(target.node_id),
        node_name=target.node_name,
        status=target.status,
        percentage=target.percentage,
        file_name=target.file_name,
        phase=target.phase,
        error=target.error or (target.reason if waits and has_explanation else ""),
        cause=cause_of(target.error, (target.node_name, element)) if target.error else "",
        dismissedAt=_iso_time(target.dismissed_at),
        reason=target.reason,
        attempts=target.attempts,
        nextLookAt=_iso_time(target.next_check_at),
        lastProgressAt=_iso_time(target.last_progress_at) if runs else "",
        timeLimitAt=_iso_time(target.time_limit_at) if runs else "",
        overdueSince=_iso_time(target.overdue_since),
        startedAt=_iso_time(target.started_at),
        finishedAt=_iso_time(target.finished_at),
        current=human_bytes(target.current_bytes) if target.current_bytes else "",
        total=human_bytes(target.total_bytes) if target.total_bytes else "",
        current_bytes=target.current_bytes,
        total_bytes=target.total_bytes,
    )
    if target.wave is not None:  # 0, which `of` omits, is the canary's.
        row["wave"] = target.wave
    return row


def _wave_state(operation: Operation, targets: Iterable[OperationTarget]) -> Row | None:
    """Return the state of an operation in waves; None for other operations."""
    if not operation.waves:
        return None
    plan = operation.payload["waves"]
    return WAVES_SHAPE.of(
        state=operation.waves,
        open=operation.open_wave,
        count=len({target.wave for target in targets if target.wave is not None}),
        maxUnavailable=plan.get("at_once", plan["max_unavailable"]),
        canary=plan["canary"],
        pauseSeconds=plan.get("pause_seconds", 0),
        stopAtFailures=plan.get("stop_at_failures", 1),
        lastReplicas=plan["last_replicas"],
    )


def _iso_time(at: datetime | None) -> str:
    return at.isoformat() if at is not None else ""


def as_dict(operation: Operation, targets: Iterable[OperationTarget] = ()) -> Row:
    """Return the operation in wire form."""
    targets, kind = list(targets), facts_of(operation.kind)
    runs, rests = operation.status == Status.PROCESSING, operation.status in _RESTING_STATUSES
    name = operation.element.rpartition("@")[2]
    return OPERATION_SHAPE.of(
        id=operation.element,
        name=name,
        fullName=operation.element,
        jobID=str(operation.id),
        kind=operation.kind,
        status=operation.status,
        progress=int(operation.progress),
        taskType=kind.task_type,
        isDeletion=kind.is_deletion,
        isBackend=kind.subject == "backend",
        isQueued=rests,
        cancellable=operation.cancellable,
        message=operation.message,
        attempts=operation.attempts,
        nextLookAt=operation.next_attempt_at.isoformat(),
        requestID=operation.request_id,
        actor=operation.actor,
        seq=operation.seq,
        createdAt=operation.created_at.isoformat(),
        nodeID=str(operation.node_id) if operation.node_id else "",
        nodeName=operation.node_name,
        phase=operation.phase,
        currentBytes=operation.current_bytes,
        totalBytes=operation.total_bytes,
        error=operation.error,
        cause=cause_of(operation.error, (operation.node_name, name)) if operation.error else "",
        nodes=[target_as_dict(target, name) for target in targets],
        startedAt=_iso_time(operation.started_at),
        finishedAt=_iso_time(operation.finished_at),
        dismissedAt=_iso_time(operation.dismissed_at),
        dismissedBy=operation.dismissed_by,
        dismissedComment=operation.dismissed_comment,
        allNodes=bool(operation.payload.get("all_nodes")),
        clientAddress=operation.client_address,
        lastProgressAt=_iso_time(operation.last_progress_at) if runs else "",
        timeLimitAt=_iso_time(operation.time_limit_at) if runs else "",
        givesUpAt=_iso_time(operation.needed_until) if rests else "",
        waves=_wave_state(operation, targets),
    )


def _to_dicts(operations: Iterable[Operation]) -> list[Row]:
    return [as_dict(operation, operation.targets.all()) for operation in operations]


def current_seq() -> int:
    """Return the number of the latest committed change."""
    return models.Sequence.objects.values_list("value", flat=True).first() or 0


@contextmanager
def shared_snapshot() -> Iterator[None]:
    """Open a transaction whose reads share one snapshot, so that no change falls between two reads."""
    with transaction.atomic():
        if not connection.savepoint_ids:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield


def snapshot() -> Feed:
    """Return the live list: active operations and undismissed failures, oldest first."""
    with shared_snapshot():
        seq = current_seq()
        return Feed(
            seq, _to_dicts(Operation.objects.listed().order_by("created_at").prefetch_related("targets"))
        )


def since(seq: int) -> Feed:
    """Return the operations that changed after `seq`, in the order of their last change."""
    with shared_snapshot():
        latest = current_seq()
        changed = Operation.objects.filter(seq__gt=seq).order_by("seq").prefetch_related("targets")
        return Feed(latest, _to_dicts(changed))


PARTIAL_KEY = "partial"
"""Key of a change whose `nodes` contains only the changed targets."""


def change_of(
    operation: Operation,
    targets: Sequence[OperationTarget],
    moved: Collection[OperationTarget] | None = None,
) -> Row:
    """Return the entry of a changed operation. `moved` are the changed targets.

    With `moved` the entry is `partial`: it lacks the unchanged targets, which the reader knows from earlier
    changes.
    """
    if moved is None or len(moved) == len(targets):
        return as_dict(operation, targets)
    name = operation.element.rpartition("@")[2]
    row = as_dict(operation) | {
        "nodes": [target_as_dict(target, name) for target in moved],
        PARTIAL_KEY: True,
    }
    if (waves := _wave_state(operation, targets)) is not None:
        row["waves"] = waves
    return row


def merge_changes(changes: Iterable[Row]) -> list[Row]:
    """Merge changes to one entry per operation, in the order of each operation's last change."""
    last: dict[str, Row] = {}
    for change in changes:
        before = last.pop(change["jobID"], None)
        last[change["jobID"]] = (
            change if before is None or PARTIAL_KEY not in change else _merge_change(before, change)
        )
    return list(last.values())


def _merge_change(before: Row, change: Row) -> Row:
    """Merge a partial change into an earlier one, which may be complete."""
    nodes = {part["node_id"]: part for part in (*before.get("nodes", ()), *change["nodes"])}
    merged = {**change, "nodes": list(nodes.values())}
    if PARTIAL_KEY not in before:
        del merged[PARTIAL_KEY]
    return merged
