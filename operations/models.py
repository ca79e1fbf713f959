"""Operations: tracked units of work from request to outcome, and their progress per target.

A row is claimed under a lease with a fencing token (`fence`); a write that carries an older fence changes
nothing. Every change takes the next number of one counter (`seq`), and because the counter's row is locked
until commit, numbers become visible in order: a reader that has read N misses nothing by reading from N + 1.
Rows are not deleted while an operation is active; failures stay until dismissed (O32, O56).

`TRANSITIONS` is the state machine: event, source states, target state and a sentence. The ledger is the only
caller. A claim matches only rows that are due; every other event needs the row to be processing under the
caller's fence, so a late event matches no row and changes nothing (I3, O56: terminal is sticky).
"""

import uuid
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Self

from django.db import models
from django.db.models import Q

from localai_cluster.kit import clock
from localai_cluster.kit.leases import LeasedRow

SUFFIX_SEPARATOR = "#"
"""Separator of owner and suffix in a key such as `model:<name>#<suffix>`."""
QUEUED = "queued"
"""Value of `phase` while no controller is running the operation (O4)."""


class Status(models.TextChoices):
    """Status of an operation (O32). The first three are active statuses.

    A key has at most one active operation.
    """

    PENDING = "pending"
    """It waits for a controller, or for `next_attempt_at`; `message` has the reason."""
    PROCESSING = "processing"
    """A controller holds the lease and is running it."""
    WAITING = "waiting_for_nodes"
    """It waits for a node. It is retried at `next_attempt_at`, or when a node changes that could run it."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


ACTIVE = (Status.PENDING, Status.PROCESSING, Status.WAITING)
TERMINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


class TargetStatus(models.TextChoices):
    """Status of one target (`contract/http-api.md` §3.2)."""

    QUEUED = "queued"
    DOWNLOADING = "downloading"
    RUNNING_ON_WORKER = "running_on_worker"
    SUCCESS = "success"
    ERROR = "error"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    """Before it began, a newer operation replaced it on this node; `reason` names that operation."""


class Waves(models.TextChoices):
    """Progress of an operation that runs in waves. `continued` and `stopped` are choices of an operator."""

    RUNNING = "running"
    ASKS = "asks"
    """A target of the open wave failed; the next waves wait for an operator's decision."""
    CONTINUED = "continued"
    STOPPED = "stopped"


WAVES_IN_PROGRESS = (Waves.RUNNING, Waves.CONTINUED)
"""States in which the next wave opens when the open wave has ended."""


class TaskType(StrEnum):
    """Kind of work as the reference's pages name it (O44)."""

    INSTALLATION = "installation"
    UPGRADE = "upgrade"
    DELETION = "deletion"
    STAGING = "staging"


@dataclass(frozen=True)
class KindFacts:
    """The properties of a kind of operation that clients see."""

    name: str
    subject: str = ""
    """The kind of object that its operations change: `backend`, `model` or `node`."""
    task_type: TaskType = TaskType.INSTALLATION
    is_deletion: bool = False
    """True if its operations cannot be cancelled once they run (O57)."""


KINDS: dict[str, KindFacts] = {}
"""All registered kinds of operations, by name."""


def facts_of(kind: str) -> KindFacts:
    """Return the properties of the kind of this name; defaults if it is not registered."""
    return KINDS.get(kind) or KindFacts(kind)


UNDISMISSED_FAILURE = Q(status="failed", dismissed_at__isnull=True)
"""Filter of the failures in the inbox."""
IN_HISTORY = Q(status__in=("completed", "cancelled")) | Q(status="failed", dismissed_at__isnull=False)
"""Filter of the history: ended operations without the failures in the inbox."""


class OperationQuerySet(models.QuerySet["Operation"]):
    """Filters of operations."""

    def active(self) -> Self:
        """Return the operations that have not ended."""
        return self.filter(status__in=("pending", "processing", "waiting_for_nodes"))

    def sharing(self, key: str, element: str) -> Self:
        """Return the operations on `element` whose key has the same owner as `key`, whatever their suffix.

        A key without a suffix comes from a release that had no suffixes.
        """
        owner = owner_of(key)
        return self.filter(
            models.Q(key__startswith=owner + SUFFIX_SEPARATOR) | models.Q(key=owner), element=element
        )

    def due(self, *, at: datetime) -> Self:
        """Return the unclaimed operations that are due at `at`.

        An operation with `by_parts` is never claimed.
        """

        return self.filter(
            status__in=("pending", "waiting_for_nodes"), next_attempt_at__lte=at, by_parts=False
        )

    def listed(self) -> Self:
        """Return the operations of the live list: active ones, and failures until dismissed (O32)."""
        active = Q(status__in=("pending", "processing", "waiting_for_nodes"))
        return self.filter(active | UNDISMISSED_FAILURE)


class Operation(LeasedRow):
    """One unit of work, with the columns of O30, a lease, a fence and a sequence number."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=32)
    """Kind, such as `backend_install` or `model_load` (O31). The handler registered for the kind runs it."""
    key = models.CharField(max_length=512)
    """The resource that the operation owns while it is active, such as `node:<id>:<backend>` (O34).

    Operations of different kinds may own the same backend. `model:<name>#<suffix>` is shared ownership:
    several operations of one kind may be active, each with its own suffix, while no operation of another kind
    is.
    """
    element = models.CharField(max_length=255)
    """Name of the backend or the model."""
    node_id = models.UUIDField(null=True, blank=True)
    node_name = models.CharField(max_length=255, blank=True, default="")
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="children"
    )
    payload = models.JSONField(default=dict)
    result = models.JSONField(default=dict)
    by_parts = models.BooleanField(default=False)
    """True if the targets run independently, each under the lease of its intent.

    The operation's state is then derived from theirs.
    """
    waves = models.CharField(max_length=16, choices=Waves, blank=True, default="")
    """State of the waves; empty if all targets run at once."""
    open_wave = models.SmallIntegerField(null=True, blank=True)
    """Number of the open wave, or of the last one that ended."""

    status = models.CharField(max_length=24, choices=Status, default=Status.PENDING)
    phase = models.CharField(max_length=32, blank=True, default="")
    message = models.TextField(blank=True, default="")
    error = models.TextField(blank=True, default="")
    progress = models.FloatField(default=0)
    current_bytes = models.BigIntegerField(default=0)
    total_bytes = models.BigIntegerField(default=0)
    file_index = models.PositiveIntegerField(default=0, db_default=0)
    """Number of the file being sent, from 1; 0 = none."""
    total_files = models.PositiveIntegerField(default=0, db_default=0)
    bytes_per_second = models.BigIntegerField(default=0, db_default=0)
    """Recent transfer rate; 0 = unknown."""

    last_progress_at = models.DateTimeField(null=True, blank=True)
    """Time at which this attempt last made progress; before that, the time of its start."""
    time_limit_at = models.DateTimeField(null=True, blank=True)
    """Time at which the current step times out; null = the step has no time limit."""

    actor = models.CharField(max_length=150, default="system")
    client_address = models.CharField(max_length=64, blank=True, default="")
    request_id = models.CharField(max_length=64, blank=True, default="")

    attempts = models.IntegerField(default=0)
    """Number of attempts that ended early with a reason. It determines the retry delay."""
    next_attempt_at = models.DateTimeField(default=clock.now)
    needed_until = models.DateTimeField(null=True, blank=True)
    """Time until which a request needs the operation; null = without limit.

    A longer wait is abandoned.
    """
    seq = models.BigIntegerField(default=0)

    created_at = models.DateTimeField(default=clock.now, editable=False)
    started_at = models.DateTimeField(null=True, editable=False)
    finished_at = models.DateTimeField(null=True, editable=False)
    dismissed_at = models.DateTimeField(null=True, blank=True)
    dismissed_by = models.CharField(max_length=150, blank=True, default="")
    """Actor that dismissed the failure, or that created the operation which supersedes it."""
    dismissed_comment = models.CharField(max_length=500, blank=True, default="")
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    objects = OperationQuerySet.as_manager()

    class Meta:
        db_table = "operations"
        ordering = ("-created_at",)
        constraints = [
            models.CheckConstraint(name="operation_status_known", condition=Q(status__in=Status.values)),
            models.UniqueConstraint(
                name="operation_one_active_a_key",
                fields=["key"],
                condition=Q(status__in=[s.value for s in ACTIVE], by_parts=False),
            ),
            models.UniqueConstraint(
                name="operation_one_active_a_key_and_kind",
                fields=["key", "kind"],
                condition=Q(status__in=[s.value for s in ACTIVE], by_parts=True),
            ),
            models.CheckConstraint(
                name="operation_leased_while_processing",
                condition=Q(status="processing", by_parts=False, lease_until__isnull=False, fence__gt=0)
                | (~Q(status="processing") & Q(lease_until__isnull=True))
                | Q(by_parts=True, lease_until__isnull=True),
            ),
            models.CheckConstraint(
                name="operation_finished_when_terminal",
                condition=Q(status__in=[s.value for s in TERMINAL], finished_at__isnull=False)
                | (~Q(status__in=[s.value for s in TERMINAL]) & Q(finished_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="operation_waves_known",
                condition=Q(waves="", open_wave__isnull=True)
                | Q(waves__in=Waves.values, open_wave__isnull=False, by_parts=True),
            ),
            models.CheckConstraint(
                name="operation_figures_valid",
                condition=Q(progress__gte=0, progress__lte=100, current_bytes__gte=0, total_bytes__gte=0),
            ),
        ]
        indexes = [
            models.Index(
                fields=["next_attempt_at"],
                name="operation_due",
                condition=Q(status__in=["pending", "waiting_for_nodes"], by_parts=False),
            ),
            models.Index(fields=["-finished_at", "-id"], name="operation_history"),
            models.Index(fields=["seq"], name="operation_seq"),
            models.Index(
                fields=["kind", "element"],
                name="operation_active",
                condition=Q(status__in=[s.value for s in ACTIVE]),
            ),
            models.Index(
                fields=["waves"],
                name="operation_in_waves",
                condition=Q(waves__gt="", status__in=[s.value for s in ACTIVE]),
            ),
            models.Index(fields=["key", "-finished_at"], name="operation_last_of_key"),
            models.Index(
                fields=["kind"],
                name="operation_failure",
                condition=UNDISMISSED_FAILURE,
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.element}"

    @property
    def cancellable(self) -> bool:
        """True if the operation is active, and not a deletion that a worker has begun (O57)."""
        deletion_has_begun = facts_of(self.kind).is_deletion and self.status == Status.PROCESSING
        return self.status in ACTIVE and not deletion_has_begun


class OperationTarget(models.Model):
    """A target of an operation: its work on one node."""

    operation = models.ForeignKey(Operation, on_delete=models.CASCADE, related_name="targets")
    node_id = models.UUIDField()
    node_name = models.CharField(max_length=255)
    status = models.CharField(max_length=24, choices=TargetStatus, default=TargetStatus.QUEUED)
    phase = models.CharField(max_length=32, blank=True, default="")
    percentage = models.FloatField(default=0)
    current_bytes = models.BigIntegerField(default=0)
    total_bytes = models.BigIntegerField(default=0)
    file_name = models.CharField(max_length=512, blank=True, default="")
    error = models.TextField(blank=True, default="")
    reason = models.TextField(blank=True, default="")
    """Reason of the wait, or a comment on the outcome."""
    intent_id = models.UUIDField(null=True, blank=True)
    """Id of the pending command (intent) that runs the target; several operations may share one."""
    wave = models.SmallIntegerField(null=True, blank=True)
    """Number of the wave in which the target begins, 0 = the canary; null = without waves.

    A target has no intent until its wave opens.
    """
    attempts = models.IntegerField(default=0)
    """Number of failed attempts; the next attempt is at `next_check_at`."""
    next_check_at = models.DateTimeField(null=True, blank=True)
    waits_for_node = models.BooleanField(default=False)
    overdue_since = models.DateTimeField(null=True, blank=True)
    """Time at which the target exceeded its time limit; the worker may still be running it (O19)."""
    last_progress_at = models.DateTimeField(null=True, blank=True)
    time_limit_at = models.DateTimeField(null=True, blank=True)
    """Time at which the current step times out; null = the step has no time limit."""
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    dismissed_at = models.DateTimeField(null=True, blank=True)
    """Time at which this target's failure was dismissed or retried, separately from other nodes."""

    class Meta:
        db_table = "operation_targets"
        verbose_name, verbose_name_plural = "operation by node", "operations by node"
        ordering = ("node_name",)
        constraints = [
            models.UniqueConstraint(name="target_once", fields=["operation", "node_id"]),
            models.CheckConstraint(name="target_status_known", condition=Q(status__in=TargetStatus.values)),
            models.CheckConstraint(
                name="target_figures_valid",
                condition=Q(percentage__gte=0, percentage__lte=100, current_bytes__gte=0, total_bytes__gte=0),
            ),
        ]
        indexes = [
            models.Index(fields=["node_id", "operation"], name="target_of_node"),
            models.Index(
                fields=["intent_id"],
                name="target_of_intent",
                condition=Q(
                    intent_id__isnull=False,
                    status__in=["queued", "downloading", "running_on_worker", "cancelled"],
                ),
            ),
        ]

    def __str__(self) -> str:
        return self.node_name


class Sequence(models.Model):
    """The counter that numbers changes (`Operation.seq`): one row, locked by its user until the commit."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    value = models.BigIntegerField(default=0)

    class Meta:
        db_table = "operation_sequence"
        verbose_name, verbose_name_plural = "change sequence", "change sequence"
        constraints = [models.CheckConstraint(name="sequence_single_row", condition=Q(id=1))]

    def __str__(self) -> str:
        return str(self.value)


class ControllerBeat(models.Model):
    """The latest heartbeat of a running controller, for display (`controllers.py`)."""

    owner = models.CharField(primary_key=True, max_length=64)
    seen_at = models.DateTimeField()
    started_at = models.DateTimeField(default=clock.now)
    version = models.CharField(max_length=64, blank=True, db_default="")
    bus_connected = models.BooleanField(default=False)

    class Meta:
        db_table = "controller_beats"
        verbose_name, verbose_name_plural = "controller", "controllers"

    def __str__(self) -> str:
        return self.owner


def owner_of(key: str) -> str:
    """Return the part of the key before its suffix; "" if it has none."""
    return key.rpartition(SUFFIX_SEPARATOR)[0]


def storable(text: str, longest: int = 64 * 1024) -> str:
    """Return the text as a column can store it: without null bytes, cut to `longest` characters.

    An outcome that cannot be written would be computed again after every lost lease.
    """
    return text.replace("\0", "\ufffd")[:longest]


class Event(StrEnum):
    """An event that may change an operation's status."""

    CLAIM = "claim"
    POSTPONE = "postpone"
    WAIT = "wait"
    RELEASE = "release"
    LOSE = "lose"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"


@dataclass(frozen=True)
class Transition:
    """One row of the table: an event leads from any status in `sources` to `target`."""

    sources: frozenset[Status]
    target: Status
    sentence: str


def _from(*sources: Status) -> frozenset[Status]:
    return frozenset(sources)


TRANSITIONS: dict[Event, Transition] = {
    Event.CLAIM: Transition(
        _from(Status.PENDING, Status.WAITING),
        Status.PROCESSING,
        "A controller takes the lease and a new fence.",
    ),
    Event.POSTPONE: Transition(
        _from(Status.PROCESSING),
        Status.PENDING,
        "An attempt ended early; it is tried again at the next look.",
    ),
    Event.WAIT: Transition(
        _from(Status.PROCESSING),
        Status.WAITING,
        "No node can take it now. It continues when one can.",
    ),
    Event.RELEASE: Transition(
        _from(Status.PROCESSING), Status.PENDING, "Its controller stops and hands it back at once."
    ),
    Event.LOSE: Transition(
        _from(Status.PROCESSING),
        Status.PENDING,
        "The lease ran out: its controller is gone; another one goes on.",
    ),
    Event.COMPLETE: Transition(_from(Status.PROCESSING), Status.COMPLETED, "The outcome is as requested."),
    Event.FAIL: Transition(
        _from(Status.PROCESSING),
        Status.FAILED,
        "It cannot be done; the error says why and stays until dismissed.",
    ),
    Event.CANCEL: Transition(
        _from(Status.PROCESSING),
        Status.CANCELLED,
        "No request needs it any more.",
    ),
}


def next_status(event: Event, status: str) -> Status:
    """Return the status after `event`; raise ValueError if the table does not allow it."""
    if status not in TRANSITIONS[event].sources:
        raise ValueError(f"{event} cannot happen to an operation that is {status}")
    return TRANSITIONS[event].target
