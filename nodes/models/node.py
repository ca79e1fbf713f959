"""A node and its labels: the rows of the registry itself.

Column and JSON names are the reference's (`contract/scheduling.md` §1A, `contract/http-api.md` §2.1). What
must never be false is a constraint here, not a habit of the callers. A row holds facts; what changes one
with a meaning is a verb in `services`. `BackendNode.status` is a generated column: approval, drain and
liveness are separate facts, so no code path can bypass approval or forget a drain.
"""

import uuid
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Self

from django.conf import settings
from django.db import models
from django.db.models import Case, Count, Exists, OuterRef, Prefetch, Q, QuerySet, Sum, Value, When
from django.db.models.functions import Coalesce

from localai_cluster import clock, names
from nodes.models import selectors

COUNTED_IN_FLIGHT = ("loaded", "unloading")
"""R1.107, D4: the states whose requests a node's `in_flight_count` sums."""


class NodeType(models.TextChoices):
    """R1.1: only `backend` nodes are scheduling targets."""

    BACKEND = "backend"
    AGENT = "agent"


class NodeStatus(models.TextChoices):
    """R1.2, derived: the first that holds, from top to bottom."""

    PENDING = "pending"
    OFFLINE = "offline"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    HEALTHY = "healthy"


_STATUS = Case(
    When(approved_at__isnull=True, then=Value(NodeStatus.PENDING.value)),
    When(offline_at__isnull=False, then=Value(NodeStatus.OFFLINE.value)),
    When(drained_at__isnull=False, then=Value(NodeStatus.DRAINING.value)),
    When(unhealthy_at__isnull=False, then=Value(NodeStatus.UNHEALTHY.value)),
    default=Value(NodeStatus.HEALTHY.value),
    output_field=models.CharField(max_length=16),
)


def _bytes() -> "models.BigIntegerField[int, int]":
    return models.BigIntegerField(default=0)


def _when() -> "models.DateTimeField[Any, Any]":
    return models.DateTimeField(null=True, blank=True, editable=False)


def _who() -> "models.CharField[str, str]":
    return models.CharField(max_length=150, blank=True, default="", editable=False)


def _why() -> "models.CharField[str, str]":
    return models.CharField(max_length=255, blank=True, default="", editable=False)


class BackendNodeQuerySet(QuerySet["BackendNode"]):
    """Adjectives of nodes: each answers with a queryset, none of them writes."""

    def silent(self, *, since: datetime) -> Self:
        """R5.4, R5.6, R5.8: approved nodes not yet offline whose last sign of life is older than `since`."""
        return self.filter(approved_at__isnull=False, offline_at__isnull=True).filter(
            Q(last_heartbeat__lt=since) | Q(last_heartbeat__isnull=True)
        )

    def placeable(self, only: Collection[uuid.UUID] = ()) -> Self:
        """Healthy backend nodes, of these only; an empty `only` restricts nothing (R1.64, R1.74)."""
        healthy = self.filter(status="healthy", node_type="backend")
        return healthy.filter(pk__in=only) if only else healthy

    def with_labels(self, labels: Mapping[str, str]) -> Self:
        """Nodes with every one of these keys at exactly that value; more labels do no harm."""
        found = self
        for key, value in labels.items():
            found = found.filter(Exists(NodeLabel.objects.filter(node=OuterRef("pk"), key=key, value=value)))
        return found

    def matching(self, selector: Any) -> Self:
        """R1.68: healthy backend nodes that a selector chooses, all of them if it is empty.

        R1.69: a selector that cannot be read chooses none.
        """
        labels = selectors.readable(selector)
        if labels is None:
            return self.none()
        return self.placeable().with_labels(labels)

    def with_counts(self) -> Self:
        """R1.107: by name, with `model_count` over loaded replicas, `in_flight_count`, and the labels.

        Two queries for any number. A model's own order does not hold for a query that groups.
        """
        busy = Q(replicas__state__in=COUNTED_IN_FLIGHT)
        return (
            self.annotate(
                model_count=Count("replicas", filter=Q(replicas__state="loaded")),
                in_flight_count=Coalesce(Sum("replicas__in_flight", filter=busy), 0),
            )
            .prefetch_related(Prefetch("label_set", queryset=NodeLabel.objects.order_by("key")))
            .order_by("name")
        )


class BackendNode(models.Model):
    """One machine: facts about approval, drain and liveness, each with who, when and why; its identity.

    Figures come from its worker, overrides and labels from admins.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=255, unique=True)
    name_key = models.CharField(max_length=255, default="", editable=False)
    """What the name looks like (`names.key`): no two nodes look alike."""
    node_type = models.CharField(max_length=16, choices=NodeType, default=NodeType.BACKEND)
    address = models.CharField(max_length=512, blank=True, default="")
    http_address = models.CharField(max_length=512, blank=True, default="")

    approved_at, approved_by, approval_reason = _when(), _who(), _why()
    rejected_at, rejected_by, reject_reason = _when(), _who(), _why()
    revoked_at, revoked_by, revoke_reason = _when(), _who(), _why()
    drained_at, drained_by, drain_reason = _when(), _who(), _why()
    drain_is_own = models.BooleanField(default=False, editable=False)
    """The worker drained itself; its next registration ends that. An admin's drain ends by an admin alone."""
    drain_deadline = _when()
    """When the replicas go even if requests still run on them."""
    engines_gone_at = _when()
    """Since when a drained node is known to run no engine: it is safe to power off."""
    engines_error = _why()
    """Why that could not be confirmed."""
    engines_due_at = _when()
    """When a controller looks again at what runs there; null = at once."""
    offline_at, offline_by, offline_reason = _when(), _who(), _why()
    offline_recovers = models.BooleanField(default=False, editable=False)
    """A heartbeat brings it back: it fell silent, it did not leave (R5.5, R5.7)."""
    unhealthy_at, unhealthy_by, unhealthy_reason = _when(), _who(), _why()
    status = models.GeneratedField(
        expression=_STATUS, output_field=models.CharField(max_length=16), db_persist=True
    )

    fingerprint = models.CharField(max_length=64, blank=True, default="", editable=False)
    """SHA-256 (hex) of the worker's own secret.

    Empty for a node known by the shared token only (`weak_identity`).
    """
    weak_identity = models.BooleanField(default=False, editable=False)
    bound_at = _when()
    """When a secret was first bound. Never cleared: such a name does not fall back to the shared token."""
    rotation_requested_at = _when()
    """Since when the secret is good for nothing but registering and replacing it."""
    instance = models.CharField(max_length=32, blank=True, default="", editable=False)
    """The worker process that speaks for the node: an id it made at its start."""
    former_instances = models.JSONField(default=list, blank=True, editable=False)
    """Ids of earlier processes, newest first; a call under one of them means a copied data folder."""
    source_address = models.CharField(max_length=64, blank=True, default="", editable=False)
    engine_token = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)
    """What its engines expect as a bearer; its worker makes it at each start. A secret: no shape has it.

    Empty for a stock worker, whose engines expect the registration token (`registry/dialling.py`).
    """
    joined_with = models.UUIDField(null=True, blank=True, editable=False)
    """Id of the join token that admitted it; null for the registration token and for enrolled nodes."""
    joined_note = models.CharField(max_length=200, blank=True, default="", db_default="", editable=False)
    joined_by = models.CharField(max_length=150, blank=True, default="", db_default="", editable=False)
    """The token's note and who made it; they outlive the token's row."""
    worker_version = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)
    """What its worker said at its last registration; stock workers say nothing."""

    total_vram, available_vram, reserved_vram = _bytes(), _bytes(), _bytes()
    total_ram, available_ram = _bytes(), _bytes()
    total_disk, available_disk = _bytes(), _bytes()
    gpus = models.JSONField(default=list, blank=True, db_default=[], editable=False)
    """Its GPUs one by one (`registry/gpus.py`), of the same reading as `available_vram`.

    Empty if its worker tells only that.
    """
    gpu_vendor = models.CharField(max_length=32, blank=True, default="")
    gpu_compute_capability = models.CharField(max_length=16, blank=True, default="")
    capability = models.CharField(max_length=64, blank=True, default="")
    max_replicas_per_model = models.IntegerField(default=1)
    max_replicas_per_model_manually_set = models.BooleanField(default=False)
    vram_budget = models.CharField(max_length=32, blank=True, default="")
    vram_budget_bytes = _bytes()
    vram_budget_manually_set = models.BooleanField(default=False)

    auth_user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    api_key = models.ForeignKey(
        "accounts.ApiKey", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    last_heartbeat = models.DateTimeField(null=True, editable=False)
    vram_read_at = _when()
    """When the worker said `available_vram`; null = before that was kept, or never."""
    reserved_at = _when()
    """When VRAM was last reserved: a beat received before that leaves `reserved_vram` alone."""
    returned_vram = models.BigIntegerField(default=0, db_default=0, editable=False)
    """What engines have given back since the reading at `returned_beside`; beside another one it is over."""
    returned_beside = _when()
    inventory_at = _when()
    """As of when `backends` is what its worker listed; null if it was never asked."""
    inventory_due_at = _when()
    """When the worker is asked again; null = as soon as somebody looks."""
    inventory_error = models.CharField(max_length=255, blank=True, default="", editable=False)
    """Why the last question had no answer."""
    file_port_error = models.CharField(max_length=255, blank=True, default="", db_default="", editable=False)
    """Why its HTTP server could not be reached; empty while nothing is wrong with it."""
    file_port_failed_at = _when()
    """Since when it could not be reached."""
    file_port_failures = models.IntegerField(default=0, db_default=0, editable=False)
    """Failed contacts in a row; each doubles the time until the next check."""
    file_port_next_check_at = _when()
    """When a controller checks it again; null = at once."""
    revision = models.IntegerField(default=0, editable=False)
    """Moves with every change but heartbeats; who edits the node shows the one he saw."""
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
                name="node_identity_strong_or_weak", condition=Q(fingerprint="") | Q(weak_identity=False)
            ),
        ]
        indexes = [models.Index(fields=["status", "node_type"], name="node_status_type")]

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Keeps `name_key` in step with a name that was given without it."""
        self.name_key = self.name_key or names.key(self.name)
        super().save(*args, **kwargs)


class NodeLabel(models.Model):
    """One `key=value` of a node (R1.40); who set it decides who may remove it."""

    class Source(models.TextChoices):
        """Where a label comes from."""

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
