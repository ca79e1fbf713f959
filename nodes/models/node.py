"""A node and its labels: the rows of the registry itself.

Column and JSON names are the reference's (`contract/scheduling.md` §1A, `contract/http-api.md` §2.1). What
must never be false is a constraint here, not a habit of the callers. A row holds facts; whatever changes one
with a meaning is a verb in `services`. `BackendNode.status` is a generated column: approval, drain and
liveness are separate facts, so no code path can bypass approval or forget a drain.
"""

import uuid
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Case, Q, Value, When

from localai_cluster import clock, names
from nodes.models.querysets import BackendNodeQuerySet


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


class BackendNode(models.Model):
    """One machine: facts about approval, drain and liveness, each with who, when and why; its identity.

    Figures come from its worker, overrides and labels from admins.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=255, unique=True)
    name_key = models.CharField(max_length=255, default="", editable=False)
    """The name after NFKC and case folding: no two nodes look alike."""
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

    total_vram, available_vram, reserved_vram = _bytes(), _bytes(), _bytes()
    total_ram, available_ram = _bytes(), _bytes()
    total_disk, available_disk = _bytes(), _bytes()
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
    reserved_at = _when()
    """When VRAM was last reserved: a beat received before that leaves `reserved_vram` alone."""
    inventory_at = _when()
    """As of when `backends` is what its worker listed; null if it was never asked."""
    inventory_due_at = _when()
    """When the worker is asked again; null = as soon as somebody looks."""
    inventory_error = models.CharField(max_length=255, blank=True, default="", editable=False)
    """Why the last question had no answer."""
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
