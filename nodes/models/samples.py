"""What each node used of its memory, minute by minute, for the charts of its page."""

from django.db import models


class NodeSample(models.Model):
    """The memory of one node in one minute of the last hour.

    It names the node without a foreign key: it outlives a removed one by an hour at most.
    """

    id = models.BigAutoField(primary_key=True)
    node_id = models.UUIDField()
    at = models.DateTimeField(help_text="the beginning of the minute")
    vram_used = models.BigIntegerField(
        null=True, blank=True, help_text="of what its budget allows; null: no VRAM"
    )
    ram_used = models.BigIntegerField(null=True, blank=True)

    class Meta:
        db_table = "node_samples"
        verbose_name, verbose_name_plural = "memory sample", "memory samples"
        constraints = [models.UniqueConstraint(name="sample_once_a_minute", fields=["node_id", "at"])]
        indexes = [models.Index(fields=["at"], name="sample_by_time")]

    def __str__(self) -> str:
        return f"{self.node_id} at {self.at:%H:%M}"
