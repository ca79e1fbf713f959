"""Nodes, their labels and events.

Column and JSON names are the reference's (`contract/scheduling.md` §1A, `contract/http-api.md` §2.1). A row
holds facts; constraints keep its invariants, and functions in `nodes.registry` change it.
`BackendNode.status` is a generated column: approval, drain and liveness are separate facts, so no code path
can bypass approval or lose a drain. `NodeEvent` has no foreign key, because an event outlives its node. The
transaction of a change writes the event of the change.
"""

import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Self

from django.conf import settings
from django.db import models
from django.db.models import BigIntegerField, Case, Exists, F, OuterRef, Q, QuerySet, Value, When
from django.db.models.functions import Cast, Floor

from localai_cluster.kit import clock, names
from nodes.models import scheduling

STATES_COUNTED_IN_FLIGHT = ("loaded", "unloading")
"""States of replicas whose requests count toward a node's `in_flight_count` (R1.107, D4)."""


class NodeType(models.TextChoices):
    """Kind of a node. Replicas are placed on `backend` nodes only (R1.1)."""

    BACKEND = "backend"
    AGENT = "agent"


class NodeStatus(models.TextChoices):
    """Status of a node: the first, from top to bottom, that applies to its facts (R1.2)."""

    PENDING = "pending"
    OFFLINE = "offline"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    HEALTHY = "healthy"


_STATUS_EXPRESSION = Case(
    When(approved_at__isnull=True, then=Value(NodeStatus.PENDING.value)),
    When(offline_at__isnull=False, then=Value(NodeStatus.OFFLINE.value)),
    When(drained_at__isnull=False, then=Value(NodeStatus.DRAINING.value)),
    When(unhealthy_at__isnull=False, then=Value(NodeStatus.UNHEALTHY.value)),
    default=Value(NodeStatus.HEALTHY.value),
    output_field=models.CharField(max_length=16),
)


_DISK_QUOTA_EXPRESSION = Case(
    When(
        disk_quota_share__gt=0, then=Cast(Floor(F("total_disk") * F("disk_quota_share")), BigIntegerField())
    ),
    default=F("disk_quota_size"),
    output_field=BigIntegerField(),
)


MIN_LATE_AFTER = timedelta(seconds=12)
"""Shortest silence after which a heartbeat is late: one of every ten seconds is missing."""


def _bytes_field() -> "models.BigIntegerField[int, int]":
    return models.BigIntegerField(default=0)


def _time_field() -> "models.DateTimeField[Any, Any]":
    return models.DateTimeField(null=True, blank=True, editable=False)


def _actor_field() -> "models.CharField[str, str]":
    return models.CharField(max_length=150, blank=True, default="", editable=False)


def _reason_field() -> "models.CharField[str, str]":
    return models.CharField(max_length=255, blank=True, default="", editable=False)


class BackendNodeQuerySet(QuerySet["BackendNode"]):
    """Filters of nodes. Each method returns a queryset; none of them writes."""

    def silent(self, *, since: datetime) -> Self:
        """Filter approved nodes without a heartbeat since `since`, except offline ones (R5.4, R5.6, R5.8)."""
        return self.filter(approved_at__isnull=False, offline_at__isnull=True).filter(
            Q(last_heartbeat__lt=since) | Q(last_heartbeat__isnull=True)
        )

    def with_labels(self, labels: Mapping[str, str]) -> Self:
        """Filter nodes that have at least these labels."""
        nodes = self
        for key, value in labels.items():
            nodes = nodes.filter(Exists(NodeLabel.objects.filter(node=OuterRef("pk"), key=key, value=value)))
        return nodes

    def matching(self, selector: Any) -> Self:
        """Filter healthy backend nodes that match a selector. An empty selector matches all (R1.68).

        An unreadable selector matches no node (R1.69).
        """
        labels = scheduling.readable_selector(selector)
        if labels is None:
            return self.none()
        return self.filter(status="healthy", node_type="backend").with_labels(labels)


class BackendNode(models.Model):
    """A machine: its identity, and facts about approval, drain and liveness with actor, time and reason.

    Its worker reports the figures. Admins set overrides and labels.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=255, unique=True)
    name_key = models.CharField(max_length=255, default="", editable=False)
    """Normalized name for comparison (`names.key`). It is unique, so no two names look alike."""
    node_type = models.CharField(max_length=16, choices=NodeType, default=NodeType.BACKEND)
    address = models.CharField(max_length=512, blank=True, default="")
    http_address = models.CharField(max_length=512, blank=True, default="")

    approved_at, approved_by, approval_reason = _time_field(), _actor_field(), _reason_field()
    rejected_at, rejected_by, reject_reason = _time_field(), _actor_field(), _reason_field()
    revoked_at, revoked_by, revoke_reason = _time_field(), _actor_field(), _reason_field()
    drained_at, drained_by, drain_reason = _time_field(), _actor_field(), _reason_field()
    drain_is_own = models.BooleanField(default=False, editable=False)
    """True if the worker drained its node itself.

    The next registration of the worker ends such a drain. Only an admin ends a drain that an admin began.
    """
    drain_deadline = _time_field()
    """Time at which the drain stops replicas that still have requests."""
    engines_gone_at = _time_field()
    """Time since which a drained node runs no engine for certain, so that it is safe to power off."""
    engines_error = _reason_field()
    """Reason why it is not confirmed that all engines have ended."""
    engines_due_at = _time_field()
    """Time of the next check of running engines; null = at once."""
    offline_at, offline_by, offline_reason = _time_field(), _actor_field(), _reason_field()
    offline_recovers = models.BooleanField(default=False, editable=False)
    """True if a heartbeat ends `offline`, because the node fell silent and did not deregister (R5.5,
    R5.7)."""
    unhealthy_at, unhealthy_by, unhealthy_reason = _time_field(), _actor_field(), _reason_field()
    status = models.GeneratedField(
        expression=_STATUS_EXPRESSION, output_field=models.CharField(max_length=16), db_persist=True
    )

    fingerprint = models.CharField(max_length=64, blank=True, default="", editable=False)
    """SHA-256 (hex) of the worker's secret.

    Empty for a node that only knows the shared token (`weak_identity`).
    """
    weak_identity = models.BooleanField(default=False, editable=False)
    bound_at = _time_field()
    """Time when a worker's secret was first bound to the node's name.

    It is never cleared: from then on the name never accepts the shared token.
    """
    rotation_requested_at = _time_field()
    """Time since which the worker's secret permits only registration and rotation."""
    instance = models.CharField(max_length=32, blank=True, default="", editable=False)
    """Id of the node's worker process, which the process creates at its start."""
    former_instances = models.JSONField(default=list, blank=True, editable=False)
    """Ids of earlier worker processes, newest first.

    A request from one of them means that the worker's data folder was copied.
    """
    source_address = models.CharField(max_length=64, blank=True, default="", editable=False)
    engine_token = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)
    """Bearer token of the node's engines, which the worker creates at each start. No API returns it.

    Empty for a stock worker, whose engines expect the registration token (`registry/dial_targets.py`).
    """
    joined_with = models.UUIDField(null=True, blank=True, editable=False)
    """Id of the join token that admitted the node. It is null for nodes that joined otherwise."""
    joined_note = models.CharField(max_length=200, blank=True, default="", db_default="", editable=False)
    joined_by = models.CharField(max_length=150, blank=True, default="", db_default="", editable=False)
    """Creator of the join token. Like `joined_note`, it is kept when the token's row is deleted."""
    worker_version = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)
    """Version of the worker in its last registration. Stock workers send none."""

    total_vram, available_vram, reserved_vram = _bytes_field(), _bytes_field(), _bytes_field()
    total_ram, available_ram = _bytes_field(), _bytes_field()
    total_disk, available_disk = _bytes_field(), _bytes_field()
    gpus = models.JSONField(default=list, blank=True, db_default=[], editable=False)
    """GPUs of the node (`registry/resources.py`), from the reading of `available_vram`.

    Empty if the worker reports only the total.
    """
    system = models.JSONField(default=dict, blank=True, db_default={}, editable=False)
    """Operating system, kernel, processor and boot time (`registry/resources.py`). Stock workers send
    none."""
    gpu_vendor = models.CharField(max_length=32, blank=True, default="")
    gpu_compute_capability = models.CharField(max_length=16, blank=True, default="")
    capability = models.CharField(max_length=64, blank=True, default="")
    max_replicas_per_model = models.IntegerField(default=1)
    max_replicas_per_model_manually_set = models.BooleanField(default=False)
    vram_budget = models.CharField(max_length=32, blank=True, default="")
    vram_budget_bytes = _bytes_field()
    vram_budget_manually_set = models.BooleanField(default=False)
    disk_quota = models.CharField(max_length=32, blank=True, default="", db_default="")
    """Disk space for model files as an admin entered it; "" for no limit."""
    disk_quota_size = models.BigIntegerField(default=0, db_default=0, editable=False)
    """Bytes of the disk quota; 0 if it is a fraction of the disk."""
    disk_quota_share = models.DecimalField(
        max_digits=13, decimal_places=12, default=Decimal(0), db_default=Decimal(0), editable=False
    )
    """Disk quota as a fraction of `total_disk`; 0 if it is in bytes."""
    disk_quota_bytes = models.GeneratedField(
        expression=_DISK_QUOTA_EXPRESSION, output_field=models.BigIntegerField(), db_persist=True
    )
    """Bytes of the disk quota at present; 0 without a limit, or if the size of the disk is not reported."""

    auth_user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    api_key = models.ForeignKey(
        "accounts.ApiKey", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    last_heartbeat = models.DateTimeField(null=True, editable=False)
    heartbeat_late_after = models.DurationField(
        default=MIN_LATE_AFTER, db_default=MIN_LATE_AFTER, editable=False
    )
    """Silence after which the next heartbeat is late, from `MIN_LATE_AFTER` to `CLUSTER_NODE_STALE_AFTER`.

    It is 1.2 times the longest recent time between two heartbeats: each heartbeat after a shorter time lowers
    it by a tenth of that time. An absence of `CLUSTER_NODE_STALE_AFTER` or more leaves it unchanged.
    """
    vram_read_at = _time_field()
    """Time of the reading of `available_vram`; null if there was none or it precedes this column."""
    reserved_at = _time_field()
    """Time of the last memory reservation. An older heartbeat leaves `reserved_vram` unchanged."""
    reserved_cleared_at = _time_field()
    """Time of the last reading that cleared `reserved_vram`; null if there was none."""
    returned_vram = models.BigIntegerField(default=0, db_default=0, editable=False)
    """Bytes that ended engines have freed since the reading at `returned_beside`. A newer reading makes it
    void."""
    returned_beside = _time_field()
    newest_load = models.UUIDField(null=True, editable=False)
    """Id of the replica for which a slot was last reserved on the node."""
    inventory_at = _time_field()
    """Time of the worker's last report of installed backends; null if there was none."""
    inventory_due_at = _time_field()
    """Time of the next request for installed backends; null = at the next pass."""
    inventory_error = models.CharField(max_length=255, blank=True, default="", editable=False)
    """Reason why the last request for installed backends failed."""
    file_port_error = models.CharField(max_length=255, blank=True, default="", db_default="", editable=False)
    """Reason why the worker's HTTP server cannot be reached; "" while it can."""
    file_port_failed_at = _time_field()
    """Time since which the worker's HTTP server cannot be reached."""
    file_port_failures = models.IntegerField(default=0, db_default=0, editable=False)
    """Number of consecutive failed checks of the worker's HTTP server. Each doubles the time to the next."""
    file_port_next_check_at = _time_field()
    """Time of the next check of the worker's HTTP server; null = at once."""
    revision = models.IntegerField(default=0, editable=False)
    """Number of changes other than heartbeats. An edit states the revision on which it is based."""
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    objects = BackendNodeQuerySet.as_manager()

    class Meta:
        db_table = "backend_nodes"
        verbose_name, verbose_name_plural = "node", "nodes"
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(name="node_type_known", condition=Q(node_type__in=NodeType.values)),
            models.UniqueConstraint(name="node_name_not_alike", fields=["name_key"]),
            models.UniqueConstraint(
                name="node_secret_once", fields=["fingerprint"], condition=~Q(fingerprint="")
            ),
            models.CheckConstraint(name="node_name_given", condition=~Q(name="")),
            models.CheckConstraint(
                name="node_backend_has_address", condition=Q(node_type=NodeType.AGENT) | ~Q(address="")
            ),
            models.CheckConstraint(
                name="node_replica_cap_positive", condition=Q(max_replicas_per_model__gte=1)
            ),
            models.CheckConstraint(
                name="node_figures_not_negative",
                condition=Q(
                    total_vram__gte=0,
                    available_vram__gte=0,
                    reserved_vram__gte=0,
                    total_ram__gte=0,
                    available_ram__gte=0,
                    total_disk__gte=0,
                    available_disk__gte=0,
                    vram_budget_bytes__gte=0,
                ),
            ),
            models.CheckConstraint(
                name="node_disk_quota",
                condition=Q(disk_quota_size__gte=0, disk_quota_share__gte=0, disk_quota_share__lte=1),
            ),
            models.CheckConstraint(
                name="node_identity_strong_or_weak", condition=Q(fingerprint="") | Q(weak_identity=False)
            ),
        ]
        indexes = [models.Index(fields=["status", "node_type"], name="node_status_type")]

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the node. Set `name_key` from the name if it is empty."""
        self.name_key = self.name_key or names.key(self.name)
        super().save(*args, **kwargs)


class NodeLabel(models.Model):
    """A label of a node (R1.40). Its source determines who may remove it."""

    class Source(models.TextChoices):
        """Who set the label."""

        WORKER = "worker"
        AUTO = "auto"
        ADMIN = "admin"

    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="label_set")
    key = models.CharField(max_length=128)
    value = models.CharField(max_length=255, blank=True)
    source = models.CharField(max_length=8, choices=Source, default=Source.ADMIN)

    class Meta:
        db_table = "node_labels"
        verbose_name, verbose_name_plural = "node label", "node labels"
        constraints = [models.UniqueConstraint(name="label_once_a_node", fields=["node", "key"])]

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


class NodeEvent(models.Model):
    """An event in a node's timeline: kind, actor, cause, and the status before and after it."""

    class Kind(models.TextChoices):
        """Kind of a node's event."""

        REGISTERED = "registered"
        APPROVED = "approved"
        REJECTED = "rejected"
        DRAINED = "drained"
        DRAIN_ENDED = "drain_ended"
        RESUMED = "resumed"
        DEACTIVATED = "deactivated", "shut down"
        FELL_SILENT = "fell_silent", "lost contact"
        HEARD_AGAIN = "heard_again", "back online"
        SILENCE_HELD = "silence_held", "kept while silent"
        MARKED_UNHEALTHY = "marked_unhealthy"
        MARKED_HEALTHY = "marked_healthy"
        DEREGISTERED = "deregistered"
        OVERRIDE = "override"
        LABELS = "labels"
        CONFLICT = "conflict"
        CONFLICT_ACCEPTED = "conflict_accepted"
        CONFLICT_REFUSED = "conflict_refused"
        ROTATION_REQUESTED = "rotation_requested"
        ROTATED = "rotated"
        REVOKED = "revoked"
        ADDRESS_REFUSED = "address_refused"

    id = models.BigAutoField(primary_key=True)
    node_id = models.UUIDField()
    node_name = models.CharField(max_length=255)
    kind = models.CharField(max_length=24, choices=Kind)
    at = models.DateTimeField()
    last_at = models.DateTimeField()
    """Time when a repeated event of a worker last occurred; otherwise equal to `at`."""
    count = models.IntegerField(default=1)
    """Number of occurrences of a worker's event within the minute; 1 for other events."""
    actor_kind = models.CharField(max_length=16)
    actor = models.CharField(max_length=150)
    cause = models.CharField(max_length=255, blank=True, default="")
    status_before = models.CharField(max_length=16, blank=True, default="")
    status_after = models.CharField(max_length=16, blank=True, default="")
    detail = models.JSONField(default=dict, blank=True)
    request_id = models.CharField(max_length=64, blank=True, default="")
    repeat_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    """Node, kind, cause, status and minute of a worker's event that changes no status. Equal events increase
    its count. Null for others."""

    class Meta:
        db_table = "node_events"
        verbose_name, verbose_name_plural = "node event", "node events"
        ordering = ("-id",)
        indexes = [
            models.Index(fields=["node_id", "-id"], name="node_event_of"),
            models.Index(fields=["at"], name="node_event_at"),
        ]

    def __str__(self) -> str:
        return f"{self.node_name}: {self.kind}"


class MassSilence(models.Model):
    """The mass-disruption hold, in a table with at most one row (`nodes/reconcilers/liveness.py`).

    While it is active, silent nodes do not become offline.
    """

    ONLY = 1

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY)
    since = models.DateTimeField()
    until = models.DateTimeField()
    """Time when the silent nodes become offline."""
    nodes = models.JSONField(default=list)
    """Ids of the silent nodes at the last liveness pass."""
    of = models.IntegerField()
    """Number of all nodes at the last liveness pass."""

    class Meta:
        db_table = "mass_silence"
        verbose_name, verbose_name_plural = "mass silence", "mass silence"
        constraints = [models.CheckConstraint(name="one_mass_silence", condition=Q(id=1))]

    def __str__(self) -> str:
        return f"{len(self.nodes)} of {self.of} nodes"
