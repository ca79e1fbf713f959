"""Placement records: a row for each decision, and the log of the snapshots that decisions used."""

import uuid

from django.db import models
from django.db.models import Q


class PlacementOutcome(models.TextChoices):
    """The outcome of a decision."""

    PLACED = "placed"
    WAITING = "waiting"
    REFUSED = "refused"
    EVICTED = "evicted"
    SCALED = "scaled"
    UNLOADING = "unloading"


class DecisionKind(models.TextChoices):
    """The kind of a decision, which determines its recomputation (`nodes/reconcilers/decision_replay.py`)."""

    PLACEMENT = "placement"
    EVICTION = "eviction"
    ATTEMPT = "attempt"
    """The outcome of a load after a failed attempt."""
    SCALE = "scale"
    UNLOAD = "unload"


class PlacementRecord(models.Model):
    """One decision, or a wait as long as its reasons stay the same (`nodes/placement/explain.py`).

    It names operation and node without a foreign key, because it outlives both; `base` and `position` name
    the log entries of its snapshot, which it outlives too. A decision that compared no fleet has no snapshot.
    """

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(max_length=16, choices=DecisionKind, default=DecisionKind.PLACEMENT)
    model_name = models.CharField(max_length=255)
    operation_id = models.UUIDField(null=True, blank=True)
    at = models.DateTimeField()
    last_at = models.DateTimeField(help_text="when its figures were read")
    outcome = models.CharField(max_length=16, choices=PlacementOutcome)
    node_id = models.UUIDField(null=True, blank=True)
    node_name = models.CharField(max_length=255, blank=True, default="")
    replica_index = models.IntegerField(null=True, blank=True)
    reason = models.TextField()
    facts = models.JSONField(default=dict)
    base = models.UUIDField(null=True, blank=True)
    position = models.IntegerField(null=True, blank=True)

    class Meta:
        db_table = "placement_records"
        verbose_name, verbose_name_plural = "placement record", "placement records"
        constraints = [
            models.CheckConstraint(
                name="placement_record_names_node",
                condition=~Q(outcome__in=["placed", "evicted"])
                | Q(node_id__isnull=False, replica_index__isnull=False),
            ),
        ]
        indexes = [
            models.Index(fields=["model_name", "-id"], name="placement_of_model"),
            models.Index(fields=["operation_id", "-id"], name="placement_of_operation"),
            models.Index(fields=["last_at"], name="placement_by_time"),
        ]

    def __str__(self) -> str:
        return f"{self.model_name}: {self.outcome}"


class PlacementLog(models.Model):
    """Snapshots of the fleet: a full one at position 0 of a base, then deltas (`snapshot_log.py`)."""

    id = models.BigAutoField(primary_key=True)
    base = models.UUIDField(default=uuid.uuid4)
    position = models.IntegerField()
    at = models.DateTimeField()
    body = models.BinaryField()

    class Meta:
        db_table = "placement_log"
        verbose_name, verbose_name_plural = "entry of the placement log", "placement log"
        constraints = [models.UniqueConstraint(name="placement_log_position", fields=["base", "position"])]
        indexes = [models.Index(fields=["at"], name="placement_log_by_time")]

    def __str__(self) -> str:
        return f"{self.base}@{self.position}"
