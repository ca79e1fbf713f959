"""Why replicas were placed where they are, or not placed: one row a decision of a load."""

from django.db import models
from django.db.models import Q


class PlacementOutcome(models.TextChoices):
    """What came of a decision: a slot, a wait, or the end of its load."""

    PLACED = "placed"
    WAITING = "waiting"
    REFUSED = "refused"


class PlacementRecord(models.Model):
    """One decision, or a wait as long as its reasons stay the same (`nodes/placement/explain.py`).

    It names operation and node without a foreign key, because it outlives both.
    """

    id = models.BigAutoField(primary_key=True)
    model_name = models.CharField(max_length=255)
    operation_id = models.UUIDField()
    at = models.DateTimeField()
    last_at = models.DateTimeField(help_text="when its figures were read")
    outcome = models.CharField(max_length=16, choices=PlacementOutcome)
    node_id = models.UUIDField(null=True, blank=True)
    node_name = models.CharField(max_length=255, blank=True, default="")
    replica_index = models.IntegerField(null=True, blank=True)
    reason = models.TextField()
    facts = models.JSONField(default=dict)

    class Meta:
        db_table = "placement_records"
        verbose_name, verbose_name_plural = "placement record", "placement records"
        constraints = [
            models.CheckConstraint(
                name="placement_record_names_node",
                condition=Q(outcome="placed", node_id__isnull=False, replica_index__isnull=False)
                | Q(outcome__in=["waiting", "refused"], node_id__isnull=True, replica_index__isnull=True),
            ),
        ]
        indexes = [
            models.Index(fields=["model_name", "-id"], name="placement_of_model"),
            models.Index(fields=["operation_id", "-id"], name="placement_of_operation"),
            models.Index(fields=["last_at"], name="placement_by_time"),
        ]

    def __str__(self) -> str:
        return f"{self.model_name}: {self.outcome}"
