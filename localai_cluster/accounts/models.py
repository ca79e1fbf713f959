"""Users' API keys, and users who still have a generated password."""

from django.conf import settings
from django.db import models

from localai_cluster import clock


class ApiKey(models.Model):
    """A user's key for REST and inference.

    Only its SHA-256 is kept, the prefix tells keys apart on a page.
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
    """A user whose password was generated; until it is changed, a session of the user allows only that."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="initial_password"
    )
    created_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "initial_passwords"
        verbose_name, verbose_name_plural = "unchanged initial password", "unchanged initial passwords"

    def __str__(self) -> str:
        return str(self.user)
