"""Backends and model files on the nodes' disks, and pending changes of backends.

`PendingBackendOp` is the *intent*: the unit of work on one backend of one node (R1.7, R1.108 to R1.120).
`nodes/backends/upgrade_state.py` writes the rows of the upgrade check, except for the columns of automatic
upgrades, which `upgrade_check.py` writes.
"""

import uuid
from datetime import datetime
from typing import Self

from django.db import models
from django.db.models import Q

from localai_cluster.kit import clock
from localai_cluster.kit.leases import LeasedRow
from nodes.models.node import BackendNode


class PendingBackendOpQuerySet(models.QuerySet["PendingBackendOp"]):
    """Filters of intents (pending changes of a backend)."""

    def resting(self) -> Self:
        """Filter intents that no controller holds a lease of and no user has cancelled."""
        return self.filter(lease_until__isnull=True, cancelled_at__isnull=True)

    def leased(self) -> Self:
        """Filter intents that a controller holds a lease of."""
        return self.filter(lease_until__isnull=False)


class PendingBackendOp(LeasedRow):
    """An intent: a pending change of one backend on one node.

    Each backend on a node has at most one intent per `op`; its intents run one at a time, in the order of
    `turn`.
    """

    class Op(models.TextChoices):
        """Kind of a change of a backend."""

        INSTALL = "install"
        UPGRADE = "upgrade"
        DELETE = "delete"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="pending_ops")
    backend = models.CharField(max_length=255)
    """The backend's name on the node."""
    op = models.CharField(max_length=16, choices=Op)
    gallery = models.CharField(max_length=255, blank=True, default="")
    """Name of the gallery to install from; "" for the first gallery that offers the backend."""
    galleries = models.TextField(blank=True, default="")
    """Galleries to use for this installation instead of the cluster's."""
    uri = models.CharField(max_length=1024, blank=True, default="")
    name = models.CharField(max_length=255, blank=True, default="")
    alias = models.CharField(max_length=255, blank=True, default="")
    force = models.BooleanField(default=False)
    spares_requests = models.BooleanField(default=False)
    """True if the node drains the backend's replicas before the worker gets the command."""
    drain_until = models.DateTimeField(null=True, blank=True)
    """Deadline of the drain; null before it begins."""
    requested_at = models.DateTimeField(default=clock.now, editable=False)
    """Time of the latest request for this change. It determines the order of a backend's intents on a
    node."""
    operation_id = models.UUIDField()
    """Id of the operation that created this intent. Commands to the worker contain it.

    Other operations may share the intent.
    """

    attempts = models.IntegerField(default=0)
    last_error = models.TextField(blank=True, default="")
    next_retry_at = models.DateTimeField(default=clock.now)
    unanswered_since = models.DateTimeField(null=True, blank=True)
    """Time since which the worker has exceeded the time limit of the command (O19)."""
    cancelled_at = models.DateTimeField(null=True, blank=True)
    """Time of the cancellation of an intent whose command the worker may have received.

    The worker gets a stop command, then the intent is deleted.
    """
    created_at = models.DateTimeField(default=clock.now, editable=False)

    objects = PendingBackendOpQuerySet.as_manager()

    class Meta:
        db_table = "pending_backend_ops"
        verbose_name, verbose_name_plural = "pending backend operation", "pending backend operations"
        constraints = [
            models.UniqueConstraint(name="intent_once", fields=["node", "backend", "op"]),
            models.UniqueConstraint(
                name="intent_one_at_a_time",
                fields=["node", "backend"],
                condition=Q(lease_until__isnull=False),
            ),
            models.CheckConstraint(name="intent_names_backend", condition=~Q(backend="")),
            models.CheckConstraint(
                name="intent_op_known", condition=Q(op__in=["install", "upgrade", "delete"])
            ),
            models.CheckConstraint(name="intent_attempts_not_negative", condition=Q(attempts__gte=0)),
            models.CheckConstraint(
                name="intent_lease_has_owner",
                condition=Q(lease_until__isnull=True, lease_owner="") | ~Q(lease_owner=""),
            ),
        ]
        indexes = [
            models.Index(fields=["next_retry_at"], name="intent_due", condition=Q(lease_until__isnull=True)),
            models.Index(
                fields=["lease_until"], name="intent_leased", condition=Q(lease_until__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.op} {self.backend}"

    @property
    def has_begun(self) -> bool:
        """True if a worker may have received the command, or a stop command is due."""
        return not (self.lease_until is None and self.unanswered_since is None and self.cancelled_at is None)

    @property
    def turn(self) -> tuple[bool, datetime, uuid.UUID]:
        """Sort key by which the intents of one backend on a node run."""
        return not self.has_begun, self.requested_at, self.id


class NodeBackendQuerySet(models.QuerySet["NodeBackend"]):
    """Filters of installed backends."""

    def named(self, name: str) -> Self:
        """Filter backends whose name or alias is `name`, ignoring case."""
        return self.filter(Q(name__iexact=name) | Q(alias__iexact=name))


class NodeBackend(models.Model):
    """A backend that is installed on a node, as its worker last reported (`contract/http-api.md` §2.10).

    `BackendNode.inventory_at` is the time of the report.
    """

    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="backends")
    name = models.CharField(max_length=255)
    is_system = models.BooleanField(default=False)
    is_meta = models.BooleanField(default=False)
    installed_at = models.CharField(max_length=64, blank=True, default="")
    gallery_url = models.CharField(max_length=2048, blank=True, default="")
    version = models.CharField(max_length=255, blank=True, default="")
    uri = models.CharField(max_length=2048, blank=True, default="")
    digest = models.CharField(max_length=255, blank=True, default="")
    alias = models.CharField(max_length=255, blank=True, default="", help_text="another name that starts it")
    size = models.BigIntegerField(default=0, db_default=0, help_text="bytes of its files; 0 = unknown")

    objects = NodeBackendQuerySet.as_manager()

    class Meta:
        db_table = "node_backends"
        verbose_name, verbose_name_plural = "installed backend", "installed backends"
        ordering = ("name",)
        constraints = [models.UniqueConstraint(name="backend_once_a_node", fields=["node", "name"])]
        indexes = [models.Index(fields=["name"], name="node_backend_name")]

    def __str__(self) -> str:
        return self.name


class BackendOffer(models.Model):
    """The version of a backend that the galleries offer for an installed name (R6.34)."""

    name = models.CharField(max_length=255, primary_key=True, help_text="as `gallery_index.folded` has it")
    version = models.CharField(max_length=255, blank=True, default="")
    uri = models.CharField(max_length=2048, blank=True, default="")
    digest = models.CharField(
        max_length=255, blank=True, default="", help_text="of an image, by its registry"
    )
    builds = models.JSONField(default=list, help_text="digests of the image's builds for single platforms")
    automatic_to = models.CharField(
        max_length=255, blank=True, default="", help_text="version or digest of the last automatic upgrade"
    )
    automatic_nodes = models.JSONField(
        default=list,
        help_text="nodes that an automatic upgrade to it was made for, or that it left to people",
    )

    class Meta:
        db_table = "backend_offers"
        verbose_name, verbose_name_plural = "backend offer", "backend offers"
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class GalleryCopy(models.Model):
    """The last readable copy of a gallery's index. It is used while the gallery cannot be read."""

    key = models.CharField(max_length=64, primary_key=True, help_text="SHA-256 of the gallery's URL")
    text = models.BinaryField(help_text="the index, packed with zlib")
    read_at = models.DateTimeField()

    class Meta:
        db_table = "gallery_copies"
        verbose_name, verbose_name_plural = "copy of a gallery", "copies of galleries"

    def __str__(self) -> str:
        return self.key


class UpgradeCheck(models.Model):
    """State of the check for backend upgrades, in a table with one row.

    A check is due while `requested` is greater than `completed`. Requests during a check cause one more
    check. `revision` counts changes of the installed and the offered backends.
    """

    ONLY = 1

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY)
    revision = models.BigIntegerField(default=0)
    requested = models.BigIntegerField(default=0)
    completed = models.BigIntegerField(default=0)
    processed = models.BigIntegerField(default=0)
    """Number of the last check request for which automatic upgrades were planned."""
    claimed_by = models.CharField(max_length=64, blank=True, default="")
    claimed_until = models.DateTimeField(null=True, blank=True)
    checked_at = models.DateTimeField(null=True, blank=True)
    problems = models.JSONField(default=dict, help_text="galleries that could not be read, and why")
    galleries = models.CharField(
        max_length=64, blank=True, default="", help_text="fingerprint of what was read"
    )

    class Meta:
        db_table = "upgrade_check"
        verbose_name, verbose_name_plural = "upgrade check", "upgrade check"
        constraints = [models.CheckConstraint(name="one_upgrade_check", condition=models.Q(id=1))]

    def __str__(self) -> str:
        return f"requested {self.requested}, completed {self.completed}"


class FileHash(models.Model):
    """SHA-256 of a file in the models folder. It is valid while the file's `stamp` is unchanged."""

    id = models.BigAutoField(primary_key=True)
    path = models.CharField(max_length=1024, unique=True, help_text="in the models folder")
    stamp = models.CharField(max_length=120, help_text="size, times and inode when it was read")
    sha256 = models.CharField(max_length=64)
    hashed_at = models.DateTimeField()

    class Meta:
        db_table = "file_hashes"
        verbose_name, verbose_name_plural = "file hash", "file hashes"
        indexes = [models.Index(fields=["hashed_at"], name="hash_by_time")]

    def __str__(self) -> str:
        return self.path


class BroughtModel(models.Model):
    """Bytes of a model's files on a node after the last load that staged files."""

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="brought_models")
    model_name = models.CharField(max_length=255)
    size = models.PositiveBigIntegerField(help_text="bytes")
    seen_at = models.DateTimeField()

    class Meta:
        db_table = "brought_models"
        verbose_name, verbose_name_plural = "model on a node's disk", "models on nodes' disks"
        constraints = [models.UniqueConstraint(fields=["model_name", "node"], name="brought_once_a_node")]

    def __str__(self) -> str:
        return f"{self.model_name} on {self.node_id}"


class UnreachedSource(models.Model):
    """The host of a model's source that a node could not reach.

    The node does not try this host again for a while.
    """

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="unreached_sources")
    host = models.CharField(max_length=255, help_text="with its port")
    seen_at = models.DateTimeField()

    class Meta:
        db_table = "unreached_sources"
        verbose_name, verbose_name_plural = "unreached source", "unreached sources"
        constraints = [models.UniqueConstraint(fields=["node", "host"], name="unreached_once_a_node")]

    def __str__(self) -> str:
        return f"{self.host} from {self.node_id}"
