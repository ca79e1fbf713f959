"""Identity of nodes: join tokens, bus credentials, conflicts and revoked secrets."""

import uuid

from django.db import models
from django.db.models import F, Q

from localai_cluster.kit import clock
from nodes.models.node import BackendNode


class JoinToken(models.Model):
    """A token that admits `max_uses` new nodes until it expires or is revoked; only its hash is stored."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    token_hash = models.CharField(max_length=64, unique=True, editable=False)
    """SHA-256 (hex) of the token."""
    note = models.CharField(max_length=200, blank=True, default="")
    created_at = models.DateTimeField(default=clock.now)
    created_by = models.CharField(max_length=150)
    expires_at = models.DateTimeField()
    max_uses = models.IntegerField(default=1)
    uses = models.IntegerField(default=0)
    """Number of nodes that joined with the token."""
    revoked_at = models.DateTimeField(null=True, blank=True)
    revoked_by = models.CharField(max_length=150, blank=True, default="")
    last_used_at = models.DateTimeField(null=True, blank=True)
    last_used_by = models.CharField(max_length=255, blank=True, default="")
    """Name of the node that last joined with the token."""

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


class BusCredential(models.Model):
    """A node's user of the message bus, valid until it is revoked. Each registration returns a new JWT.

    JWT and seed are not stored; the seed is derived from the account's key, the node and the salt. There is
    no foreign key, because the credentials of a removed node must stay revoked until they expire.
    """

    public_key = models.CharField(max_length=56, primary_key=True)
    """Public key of the bus user (`U…`)."""
    node_id = models.UUIDField(db_index=True)
    salt = models.CharField(max_length=32)
    """Random text from which the key is derived. A new salt after a revocation creates another bus user."""
    issued_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)
    """Time when the latest JWT expires."""
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "bus_credentials"
        verbose_name, verbose_name_plural = "bus credential", "bus credentials"

    def __str__(self) -> str:
        return self.public_key


class NodeConflict(models.Model):
    """A claim by another machine or process that it is this node.

    The node keeps working until an admin decides.
    """

    class Mismatch(models.TextChoices):
        """The property in which the claim differs from the node."""

        SECRET = "secret", "another secret"
        WEAK = "weak", "a secret for a node known by the shared token"
        TOKEN = "token", "the shared token for a node with a secret"
        INSTANCE = "instance", "two processes with one secret"
        NAME = "name", "the node's secret under another name"
        ADDRESS = "address", "another address for a node known by the shared token"

    class State(models.TextChoices):
        """An admin's decision about the claim."""

        OPEN = "open"
        ACCEPTED = "accepted"
        REFUSED = "refused"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="conflicts")
    kind = models.CharField(max_length=16, choices=Mismatch)
    state = models.CharField(max_length=16, choices=State, default=State.OPEN)
    claim = models.CharField(max_length=64)
    """Identifier of the claimant: its fingerprint, instance, source address or hash of addresses."""
    claimed_name = models.CharField(max_length=255, blank=True, default="")
    source_address = models.CharField(max_length=64, blank=True, default="")
    advertised_address = models.CharField(max_length=512, blank=True, default="")
    node_source_address = models.CharField(max_length=64, blank=True, default="")
    """Last source address of the registered node, for comparison with the claim."""
    count = models.IntegerField(default=1)
    first_at = models.DateTimeField(default=clock.now)
    last_at = models.DateTimeField(default=clock.now)
    decided_at = models.DateTimeField(null=True, blank=True)
    decided_by = models.CharField(max_length=150, blank=True, default="")

    class Meta:
        db_table = "node_conflicts"
        verbose_name, verbose_name_plural = "identity conflict", "identity conflicts"
        ordering = ("-last_at",)
        constraints = [models.UniqueConstraint(name="conflict_once", fields=["node", "kind", "claim"])]
        indexes = [models.Index(fields=["node"], name="conflict_open", condition=Q(state="open"))]

    def __str__(self) -> str:
        return f"{self.kind} from {self.source_address}"


class RevokedSecret(models.Model):
    """A worker's secret that is never accepted again, for any node."""

    fingerprint = models.CharField(primary_key=True, max_length=64)
    node_id = models.UUIDField()
    node_name = models.CharField(max_length=255)
    revoked_at = models.DateTimeField(default=clock.now)
    revoked_by = models.CharField(max_length=150, blank=True, default="")

    class Meta:
        db_table = "revoked_secrets"
        verbose_name, verbose_name_plural = "revoked secret", "revoked secrets"

    def __str__(self) -> str:
        return f"of {self.node_name}"
