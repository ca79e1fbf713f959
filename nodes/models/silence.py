"""That too many nodes have fallen silent at once, and until when they are kept for that."""

from django.db import models
from django.db.models import Q


class MassSilence(models.Model):
    """The one row that is there while silent nodes are kept (`nodes/reconcilers/liveness.py`)."""

    ONLY = 1

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY)
    since = models.DateTimeField()
    until = models.DateTimeField()
    """When the silent nodes are given up if they were not heard."""
    nodes = models.JSONField(default=list)
    """The ids of the nodes that were silent at the last pass."""
    of = models.IntegerField()
    """How many nodes there were, the silent ones among them."""

    class Meta:
        db_table = "mass_silence"
        verbose_name, verbose_name_plural = "mass silence", "mass silence"
        constraints = [models.CheckConstraint(name="one_mass_silence", condition=Q(id=1))]

    def __str__(self) -> str:
        return f"{len(self.nodes)} of {self.of} nodes"
