"""What the cluster remembers of models and still owes to nodes."""

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q

from localai_cluster import clock, errors
from nodes.models import selectors
from nodes.models.node import BackendNode


class ModelLoadInfo(models.Model):
    """How a model was last loaded (R1.6): outlives its replicas."""

    model_name = models.CharField(max_length=255, unique=True)
    backend_type = models.CharField(max_length=255)
    model_options = models.JSONField(default=dict)
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "model_load_infos"
        verbose_name, verbose_name_plural = "model load record", "model load records"
        constraints = [models.CheckConstraint(name="load_info_names_model", condition=~Q(model_name=""))]

    def __str__(self) -> str:
        return self.model_name


class PendingBackendOp(models.Model):
    """The durable intent "this must become true on this node" (R1.7); the full request is kept (R1.115)."""

    class Op(models.TextChoices):
        """What must become true."""

        INSTALL = "install"
        UPGRADE = "upgrade"
        DELETE = "delete"

    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="pending_ops")
    backend = models.CharField(max_length=255)
    op = models.CharField(max_length=16, choices=Op)
    galleries = models.TextField(blank=True, default="")
    uri = models.CharField(max_length=1024, blank=True, default="")
    name = models.CharField(max_length=255, blank=True, default="")
    alias = models.CharField(max_length=255, blank=True, default="")
    operation_id = models.UUIDField(null=True, blank=True)
    """The running operation that carries it out; while it has a lease the intent is not due (R1.108, H14)."""
    attempts = models.IntegerField(default=0)
    last_error = models.TextField(blank=True, default="")
    next_retry_at = models.DateTimeField(default=clock.now)
    created_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "pending_backend_ops"
        verbose_name, verbose_name_plural = "pending backend operation", "pending backend operations"
        constraints = [
            models.UniqueConstraint(name="intent_once", fields=["node", "backend", "op"]),
            models.CheckConstraint(name="intent_names_backend", condition=~Q(backend="")),
            models.CheckConstraint(
                name="intent_op_known", condition=Q(op__in=["install", "upgrade", "delete"])
            ),
            models.CheckConstraint(name="intent_attempts_not_negative", condition=Q(attempts__gte=0)),
        ]

    def __str__(self) -> str:
        return f"{self.op} {self.backend}"


class ModelSchedulingConfig(models.Model):
    """Where and how often a model shall run (R1.8)."""

    model_name = models.CharField(max_length=255, unique=True)
    node_selector = models.JSONField(default=dict, blank=True)
    min_replicas = models.IntegerField(default=0)
    max_replicas = models.IntegerField(default=0)
    spread_all = models.BooleanField(default=False)
    route_policy = models.CharField(max_length=32, blank=True, default="")
    balance_abs_threshold = models.IntegerField(null=True, blank=True)
    balance_rel_threshold = models.FloatField(null=True, blank=True)
    min_prefix_match = models.FloatField(null=True, blank=True)
    unsatisfiable_until = models.DateTimeField(null=True, blank=True, editable=False)
    unsatisfiable_ticks = models.IntegerField(default=0, editable=False)
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "model_scheduling_configs"
        verbose_name, verbose_name_plural = "scheduling rule", "scheduling rules"
        constraints = [
            models.CheckConstraint(
                name="scheduling_counts_valid",
                condition=Q(min_replicas__gte=0, max_replicas__gte=0, unsatisfiable_ticks__gte=0),
            ),
            models.CheckConstraint(
                name="scheduling_min_within_max",
                condition=Q(max_replicas=0) | Q(min_replicas__lte=F("max_replicas")),
            ),
        ]

    def __str__(self) -> str:
        return self.model_name

    def clean(self) -> None:
        """R1.69: a selector that cannot be read is refused, so that it never means "any node"."""
        try:
            selectors.check(self.node_selector)
        except errors.InvalidInput as refusal:
            raise ValidationError({"node_selector": refusal.message}) from None
