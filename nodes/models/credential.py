"""Who nodes are on the message bus."""

from django.db import models


class BusCredential(models.Model):
    """One user of the bus: a node until its credentials are revoked. Each registration gives it a new JWT.

    JWT and seed are not stored; the seed is derived from the account's key, node and salt. There is no
    foreign key: the credentials of a node that was removed must stay revoked until they expire.
    """

    public_key = models.CharField(max_length=56, primary_key=True)
    """The user (`U…`)."""
    node_id = models.UUIDField(db_index=True)
    salt = models.CharField(max_length=32)
    """Makes the node another user after a revocation."""
    issued_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)
    """When the last JWT expires."""
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "bus_credentials"
        verbose_name, verbose_name_plural = "bus credential", "bus credentials"

    def __str__(self) -> str:
        return self.public_key
