"""Responses that `/v1/responses` stores for later requests (`nodes/dialects/stored_responses.py`)."""

from datetime import datetime

from django.db import models
from django.db.models import Q

from localai_cluster.accounts.models import ApiKey


class StoredResponseQuerySet(models.QuerySet["StoredResponse"]):
    """Filters of stored responses."""

    def prune(self, *, before: datetime, limit: int) -> int:
        """Delete up to `limit` responses that are unused since `before` or whose key is revoked.

        Return the number of deleted responses.
        """
        revoked = ApiKey.objects.filter(Q(revoked_at__isnull=False) | Q(user__is_active=False))
        ended = self.filter(Q(used_at__lt=before) | Q(owner__in=revoked.values("key_hash"))).order_by("pk")
        return self.filter(pk__in=list(ended.values_list("pk", flat=True)[:limit])).delete()[0]


class StoredResponse(models.Model):
    """A stored response. Only the API key that requested it can read, continue or delete it."""

    id = models.CharField(max_length=64, primary_key=True)
    owner = models.CharField(max_length=64, help_text="SHA-256 of the API key")
    previous_id = models.CharField(max_length=64, blank=True, default="", help_text="what it continues")
    created_at = models.DateTimeField()
    used_at = models.DateTimeField(help_text="last use, accurate to a tenth of the retention")
    size = models.PositiveIntegerField(help_text="bytes, for the limit of the key")
    input = models.BinaryField(help_text="items of the request: a JSON list")
    output = models.BinaryField(help_text="items of the response: a JSON list")
    response = models.BinaryField(help_text="the response without its output: a JSON object")

    objects = StoredResponseQuerySet.as_manager()

    class Meta:
        db_table = "stored_responses"
        verbose_name, verbose_name_plural = "stored response", "stored responses"
        indexes = [
            models.Index(fields=["owner", "-used_at", "id"], name="response_of", include=["size"]),
            models.Index(fields=["used_at"], name="response_used"),
        ]

    def __str__(self) -> str:
        return self.id
