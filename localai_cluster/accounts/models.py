"""Models of users' API keys, of unchanged generated passwords, and of the audit."""

from typing import ClassVar

from django.conf import settings
from django.db import models

from localai_cluster.kit import clock


class ApiKey(models.Model):
    """A user's key for REST and inference.

    Only the key's SHA-256 is stored. Pages show the prefix to identify the key.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=12, editable=False)
    key_hash = models.CharField(max_length=64, unique=True, editable=False)
    created_at = models.DateTimeField(default=clock.now, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "api_keys"
        verbose_name, verbose_name_plural = "API key", "API keys"

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class InitialPassword(models.Model):
    """A user who has a generated password. The user can do nothing but change it."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="initial_password"
    )
    created_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "initial_passwords"
        verbose_name, verbose_name_plural = "unchanged initial password", "unchanged initial passwords"

    def __str__(self) -> str:
        return str(self.user)


class AuditEntry(models.Model):
    """A change that a person made. Entries are never updated; `audit.py` is the only writer."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField()
    kind = models.CharField(max_length=64)
    """Kind of the change, such as `operation.cancelled`: the kind of the changed object, a dot, the event."""
    actor_kind = models.CharField(max_length=16)
    actor = models.CharField(max_length=150)
    address = models.CharField(max_length=64, blank=True, default="")
    """IP address of the client; "" for a command on the server."""
    request_id = models.CharField(max_length=64, blank=True, default="")
    subject = models.CharField(max_length=255)
    """Readable name of the changed object."""
    subject_id = models.CharField(max_length=64, blank=True, default="")
    detail = models.CharField(max_length=255, blank=True, default="")

    objects: ClassVar[models.Manager["AuditEntry"]] = models.Manager()

    class Meta:
        db_table = "audit_entries"
        verbose_name, verbose_name_plural = "change by a person", "changes by people"
        ordering = ("-id",)
        indexes = [
            models.Index(fields=["at"], name="audit_at"),
            models.Index(fields=["actor", "-id"], name="audit_by"),
            models.Index(fields=["subject_id", "-id"], name="audit_of"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"
