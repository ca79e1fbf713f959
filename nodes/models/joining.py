"""Join tokens: what lets another machine register, for a while and a number of times.

`nodes/registry/joining.py` is the only writer. The token itself is stored nowhere.
"""

import uuid

from django.db import models
from django.db.models import F, Q

from localai_cluster.kit import clock


class JoinToken(models.Model):
    """A token that admits `max_uses` new nodes until it expires or is revoked."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    token_hash = models.CharField(max_length=64, unique=True, editable=False)
    """SHA-256 (hex) of the token."""
    note = models.CharField(max_length=200, blank=True, default="")
    created_at = models.DateTimeField(default=clock.now)
    created_by = models.CharField(max_length=150)
    expires_at = models.DateTimeField()
    max_uses = models.IntegerField(default=1)
    uses = models.IntegerField(default=0)
    """How many new nodes it has admitted."""
    revoked_at = models.DateTimeField(null=True, blank=True)
    revoked_by = models.CharField(max_length=150, blank=True, default="")
    last_used_at = models.DateTimeField(null=True, blank=True)
    last_used_by = models.CharField(max_length=255, blank=True, default="")
    """Name of the node that joined last."""

    class Meta:
        db_table = "join_tokens"
        verbose_name, verbose_name_plural = "join token", "join tokens"
        ordering = ("-created_at", "id")
        constraints = [
            models.CheckConstraint(
                name="join_token_uses_within_limit", condition=Q(uses__gte=0, uses__lte=F("max_uses"))
            )
        ]
        indexes = [models.Index(fields=["expires_at"], name="join_token_expires")]

    def __str__(self) -> str:
        return self.note or str(self.pk)[:8]
