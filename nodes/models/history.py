"""Events of nodes, conflicts about their identity, and revoked secrets.

`NodeEvent` is append-only and has no foreign key: it outlives its node by the retention. Events are written
by the transaction that makes the change, so a change and its event exist together or not at all.
"""

import uuid

from django.db import models
from django.db.models import Q

from localai_cluster.kit import clock
from nodes.models.node import BackendNode


class NodeEvent(models.Model):
    """One event of a node: kind, actor, cause, and the status before and after."""

    class Kind(models.TextChoices):
        """The kind of an event."""

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
    """Time of the last repetition of a conflict; otherwise equal to `at`."""
    count = models.IntegerField(default=1)
    """Repetitions of a conflict within the minute; otherwise 1."""
    actor_kind = models.CharField(max_length=16)
    actor = models.CharField(max_length=150)
    cause = models.CharField(max_length=255, blank=True, default="")
    status_before = models.CharField(max_length=16, blank=True, default="")
    status_after = models.CharField(max_length=16, blank=True, default="")
    detail = models.JSONField(default=dict, blank=True)
    request_id = models.CharField(max_length=64, blank=True, default="")
    repeat_key = models.CharField(max_length=64, null=True, blank=True, unique=True)
    """Node, kind, cause and minute of an event that is counted instead of repeated; null for all others."""

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


class NodeConflict(models.Model):
    """A claim of another machine or process to be a node. The node keeps working until an admin decides."""

    class Mismatch(models.TextChoices):
        """The property of the claim that does not match the node."""

        SECRET = "secret", "another secret"
        WEAK = "weak", "a secret for a node known by the shared token"
        TOKEN = "token", "the shared token for a node with a secret"
        INSTANCE = "instance", "two processes with one secret"
        NAME = "name", "the node's secret under another name"
        ADDRESS = "address", "another address for a node known by the shared token"

    class State(models.TextChoices):
        """The decision of an admin."""

        OPEN = "open"
        ACCEPTED = "accepted"
        REFUSED = "refused"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="conflicts")
    kind = models.CharField(max_length=16, choices=Mismatch)
    state = models.CharField(max_length=16, choices=State, default=State.OPEN)
    claim = models.CharField(max_length=64)
    """Identifier of the claimant: fingerprint, instance, source address or hash of addresses."""
    claimed_name = models.CharField(max_length=255, blank=True, default="")
    source_address = models.CharField(max_length=64, blank=True, default="")
    advertised_address = models.CharField(max_length=512, blank=True, default="")
    node_source_address = models.CharField(max_length=64, blank=True, default="")
    """The last source address of the node itself, for comparison."""
    count = models.IntegerField(default=1)
    first_at = models.DateTimeField(default=clock.now)
    last_at = models.DateTimeField(default=clock.now)
    decided_at = models.DateTimeField(null=True, blank=True)
    decided_by = models.CharField(max_length=150, blank=True, default="")

    class Meta:
        db_table = "node_conflicts"
        verbose_name, verbose_name_plural = "identity conflict", "identity conflicts"
        ordering = ("-last_at",)
        constraints = [models.UniqueConstraint(name="conflict_once", fields=["node", "kind", "claim"])]
        indexes = [models.Index(fields=["node"], name="conflict_open", condition=Q(state="open"))]

    def __str__(self) -> str:
        return f"{self.kind} from {self.source_address}"


class RevokedSecret(models.Model):
    """A secret that is never accepted again, under any name."""

    fingerprint = models.CharField(primary_key=True, max_length=64)
    node_id = models.UUIDField()
    node_name = models.CharField(max_length=255)
    revoked_at = models.DateTimeField(default=clock.now)
    revoked_by = models.CharField(max_length=150, blank=True, default="")

    class Meta:
        db_table = "revoked_secrets"
        verbose_name, verbose_name_plural = "revoked secret", "revoked secrets"

    def __str__(self) -> str:
        return f"of {self.node_name}"
