"""Intents: what must become true of one backend on one node, until it is, or until it ended with a reason.

An intent is the unit of work on one node (R1.7, R1.108 to R1.120). It is carried out under a lease with a
fence, like an operation. The parts of operations that ask for it carry its id; they keep the story, the
intent goes.
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
    """Adjectives of intents."""

    def resting(self) -> Self:
        """Not carried out at the moment, and not called off."""
        return self.filter(lease_until__isnull=True, cancelled_at__isnull=True)

    def leased(self) -> Self:
        """Return the intents that a controller is running under a lease."""
        return self.filter(lease_until__isnull=False)


class PendingBackendOp(LeasedRow):
    """One intent. At most one for each op of a backend on a node; these run one at a time, by `turn`."""

    class Op(models.TextChoices):
        """What must become true."""

        INSTALL = "install"
        UPGRADE = "upgrade"
        DELETE = "delete"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="pending_ops")
    backend = models.CharField(max_length=255)
    """The backend's name on the node."""
    op = models.CharField(max_length=16, choices=Op)
    gallery = models.CharField(max_length=255, blank=True, default="")
    """The one gallery that an install is to come from; "" = the first that has it."""
    galleries = models.TextField(blank=True, default="")
    """Galleries that an admin names in place of the cluster's."""
    uri = models.CharField(max_length=1024, blank=True, default="")
    name = models.CharField(max_length=255, blank=True, default="")
    alias = models.CharField(max_length=255, blank=True, default="")
    force = models.BooleanField(default=False)
    spares_requests = models.BooleanField(default=False)
    """The node's replicas of the backend leave the picks, and their requests may end, before it is sent."""
    drain_until = models.DateTimeField(null=True, blank=True)
    """Until when it waits for those requests, once the replicas are out."""
    requested_at = models.DateTimeField(default=clock.now, editable=False)
    """The latest request for it. Rows of one node and backend run in the order of these."""
    operation_id = models.UUIDField()
    """The operation that created it. Workers know the work by this id; other operations may share it."""

    attempts = models.IntegerField(default=0)
    last_error = models.TextField(blank=True, default="")
    next_retry_at = models.DateTimeField(default=clock.now)
    unanswered_since = models.DateTimeField(null=True, blank=True)
    """Since when the worker has had it for longer than its time limit and given no answer (O19)."""
    cancelled_at = models.DateTimeField(null=True, blank=True)
    """Cancelled after a worker may have begun: the worker gets a stop, then the intent is deleted."""
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
        """True if a worker may be running it, or must get a stop."""
        return not (self.lease_until is None and self.unanswered_since is None and self.cancelled_at is None)

    @property
    def turn(self) -> tuple[bool, datetime, uuid.UUID]:
        """Sort key among the rows of its node and backend: they run in this order."""
        return not self.has_begun, self.requested_at, self.id
