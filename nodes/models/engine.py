"""Engines that a load may have started and that no replica row accounts for yet."""

from django.db import models

from localai_cluster import clock


class EngineStart(models.Model):
    """A worker was told to start this engine. The row goes when a replica is published or the engine is gone.

    It has no foreign key: replicas and nodes may go while the engine still lives.
    """

    node_id = models.UUIDField()
    model_name = models.CharField(max_length=255)
    replica_index = models.IntegerField(default=0)
    mark = models.CharField(max_length=64)
    """Operation id and fence of the load; a later load that takes over the same place takes over the row."""
    address = models.CharField(max_length=512, blank=True, default="")
    """Where the engine listens; empty until the worker has answered the start."""
    answered = models.BooleanField(default=False, db_default=False)
    """Whether the worker has answered the start, with an address or a refusal."""
    started_at = models.DateTimeField(default=clock.now)
    stop_due_at = models.DateTimeField(default=clock.now)
    """When a controller looks again whether the engine must be stopped."""
    stop_attempts = models.IntegerField(default=0)

    class Meta:
        db_table = "engine_starts"
        verbose_name, verbose_name_plural = "started engine", "started engines"
        constraints = [
            models.UniqueConstraint(
                name="engine_start_once_a_place", fields=["node_id", "model_name", "replica_index"]
            )
        ]

    def __str__(self) -> str:
        return f"{self.model_name}#{self.replica_index}"
