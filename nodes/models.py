"""The registry's rows: nodes, their labels and replicas, what the cluster remembers of models, and API keys.

Column and JSON names are the reference's (`contract/scheduling.md` §1A, `contract/http-api.md` §2.1). What
must never be false is a constraint here, not a habit of the callers. A row holds facts; everything that
changes one with a meaning is a verb in `services.py`. `BackendNode.status` is a generated column: approval,
drain and liveness are separate facts, so no code path can bypass approval or forget a drain.
"""

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Case, F, Q, Value, When

from localai_cluster import clock
from nodes.querysets import BackendNodeQuerySet, NodeModelQuerySet


class NodeType(models.TextChoices):
    """R1.1: only `backend` nodes are scheduling targets."""

    BACKEND = "backend"
    AGENT = "agent"


class NodeStatus(models.TextChoices):
    """R1.2, derived: the first that holds, from top to bottom."""

    PENDING = "pending"
    OFFLINE = "offline"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    HEALTHY = "healthy"


class ReplicaState(models.TextChoices):
    """R1.4: only `loaded` rows receive traffic."""

    STAGING = "staging"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    IDLE = "idle"


_STATUS = Case(
    When(approved_at__isnull=True, then=Value(NodeStatus.PENDING.value)),
    When(offline_at__isnull=False, then=Value(NodeStatus.OFFLINE.value)),
    When(drained_at__isnull=False, then=Value(NodeStatus.DRAINING.value)),
    When(unhealthy_at__isnull=False, then=Value(NodeStatus.UNHEALTHY.value)),
    default=Value(NodeStatus.HEALTHY.value),
    output_field=models.CharField(max_length=16),
)


def _bytes() -> "models.BigIntegerField[int, int]":
    return models.BigIntegerField(default=0)


class BackendNode(models.Model):
    """One machine. Three facts (approval, drain, liveness), each with who, when and why.

    Figures from its worker.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=255, unique=True)
    node_type = models.CharField(max_length=16, choices=NodeType, default=NodeType.BACKEND)
    address = models.CharField(max_length=512, blank=True, default="")
    http_address = models.CharField(max_length=512, blank=True, default="")

    approved_at = models.DateTimeField(null=True, blank=True, editable=False)
    approved_by = models.CharField(max_length=150, blank=True, default="", editable=False)
    drained_at = models.DateTimeField(null=True, blank=True, editable=False)
    drained_by = models.CharField(max_length=150, blank=True, default="", editable=False)
    drain_reason = models.CharField(max_length=255, blank=True, default="", editable=False)
    offline_at = models.DateTimeField(null=True, blank=True, editable=False)
    offline_reason = models.CharField(max_length=255, blank=True, default="", editable=False)
    unhealthy_at = models.DateTimeField(null=True, blank=True, editable=False)
    unhealthy_reason = models.CharField(max_length=255, blank=True, default="", editable=False)
    status = models.GeneratedField(
        expression=_STATUS, output_field=models.CharField(max_length=16), db_persist=True
    )

    fingerprint = models.CharField(max_length=64, blank=True, default="", editable=False)
    """SHA-256 (hex) of the worker's own secret.

    Empty for a node known by the shared token only (`weak_identity`).
    """
    weak_identity = models.BooleanField(default=False, editable=False)
    source_address = models.CharField(max_length=64, blank=True, default="", editable=False)

    total_vram, available_vram, reserved_vram = _bytes(), _bytes(), _bytes()
    total_ram, available_ram = _bytes(), _bytes()
    total_disk, available_disk = _bytes(), _bytes()
    gpu_vendor = models.CharField(max_length=32, blank=True, default="")
    gpu_compute_capability = models.CharField(max_length=16, blank=True, default="")
    capability = models.CharField(max_length=64, blank=True, default="")
    max_replicas_per_model = models.IntegerField(default=1)
    max_replicas_per_model_manually_set = models.BooleanField(default=False)
    vram_budget = models.CharField(max_length=32, blank=True, default="")
    vram_budget_bytes = _bytes()
    vram_budget_manually_set = models.BooleanField(default=False)

    auth_user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    api_key = models.ForeignKey("ApiKey", null=True, blank=True, on_delete=models.SET_NULL, related_name="+")
    last_heartbeat = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    objects = BackendNodeQuerySet.as_manager()

    class Meta:
        db_table = "backend_nodes"
        verbose_name, verbose_name_plural = "node", "nodes"
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(name="node_type_known", condition=Q(node_type__in=NodeType.values)),
            models.CheckConstraint(name="node_name_given", condition=~Q(name="")),
            models.CheckConstraint(
                name="node_backend_has_address", condition=Q(node_type=NodeType.AGENT) | ~Q(address="")
            ),
            models.CheckConstraint(
                name="node_replica_cap_positive", condition=Q(max_replicas_per_model__gte=1)
            ),
            models.CheckConstraint(
                name="node_figures_not_negative",
                condition=Q(
                    total_vram__gte=0,
                    available_vram__gte=0,
                    reserved_vram__gte=0,
                    total_ram__gte=0,
                    available_ram__gte=0,
                    total_disk__gte=0,
                    available_disk__gte=0,
                    vram_budget_bytes__gte=0,
                ),
            ),
            models.CheckConstraint(
                name="node_identity_strong_or_weak", condition=Q(fingerprint="") | Q(weak_identity=False)
            ),
        ]
        indexes = [models.Index(fields=["status", "node_type"], name="node_status_type")]

    def __str__(self) -> str:
        return self.name


class NodeLabel(models.Model):
    """One `key=value` of a node (R1.40); who set it decides who may remove it."""

    class Source(models.TextChoices):
        """Where a label comes from."""

        WORKER = "worker"
        AUTO = "auto"
        ADMIN = "admin"

    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="label_set")
    key = models.CharField(max_length=128)
    value = models.CharField(max_length=255, blank=True)
    source = models.CharField(max_length=8, choices=Source, default=Source.ADMIN)

    class Meta:
        db_table = "node_labels"
        verbose_name, verbose_name_plural = "node label", "node labels"
        constraints = [models.UniqueConstraint(name="label_once_a_node", fields=["node", "key"])]

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


class NodeModel(models.Model):
    """One replica: a backend process that serves one model on one node (R1.4, R1.5)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="replicas")
    model_name = models.CharField(max_length=255)
    replica_index = models.IntegerField(default=0)
    address = models.CharField(max_length=512, blank=True, default="")
    state = models.CharField(max_length=16, choices=ReplicaState, default=ReplicaState.LOADING)
    in_flight = models.IntegerField(default=0)
    last_used = models.DateTimeField(default=clock.now)
    loading_by = models.CharField(max_length=64, blank=True, default="")
    """Operation id and fence that own a row in `loading`; empty once loaded."""
    backend_type = models.CharField(max_length=255, blank=True, default="")
    model_options = models.JSONField(default=dict, blank=True)
    config_revision = models.CharField(max_length=64, blank=True, default="")
    effective_options_hash = models.CharField(max_length=64, blank=True, default="")
    cleanup_error = models.CharField(max_length=240, blank=True, default="")
    cleanup_attempts = models.IntegerField(default=0)
    cleanup_next_retry_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    objects = NodeModelQuerySet.as_manager()

    class Meta:
        db_table = "node_models"
        verbose_name, verbose_name_plural = "replica", "replicas"
        constraints = [
            models.UniqueConstraint(
                name="replica_once_a_slot", fields=["node", "model_name", "replica_index"]
            ),
            models.CheckConstraint(name="replica_in_flight_not_negative", condition=Q(in_flight__gte=0)),
            models.CheckConstraint(name="replica_index_not_negative", condition=Q(replica_index__gte=0)),
            models.CheckConstraint(name="replica_state_known", condition=Q(state__in=ReplicaState.values)),
            models.CheckConstraint(
                name="replica_loaded_has_address", condition=~Q(state=ReplicaState.LOADED) | ~Q(address="")
            ),
        ]
        indexes = [models.Index(fields=["model_name"], name="replica_model", condition=Q(state="loaded"))]

    def __str__(self) -> str:
        return f"{self.model_name}#{self.replica_index}"


class ModelLoadInfo(models.Model):
    """How a model was last loaded (R1.6): outlives its replicas."""

    model_name = models.CharField(max_length=255, unique=True)
    backend_type = models.CharField(max_length=255)
    model_options = models.JSONField(default=dict)
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "model_load_infos"
        verbose_name, verbose_name_plural = "load info", "load infos"
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


class WebProcess(models.Model):
    """One running web process; when it falls silent its in-flight counts are taken back (`nodes/health`)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    started_at = models.DateTimeField(default=clock.now)
    seen_at = models.DateTimeField(default=clock.now)
    hearing_since = models.DateTimeField(default=clock.now)
    """Since when it has been there without a gap: what was silent before that, nobody could have heard."""

    class Meta:
        db_table = "web_processes"
        verbose_name, verbose_name_plural = "web process", "web processes"

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class ReplicaUse(models.Model):
    """How many of a replica's requests one web process carries.

    `NodeModel.in_flight` is the sum over processes.
    """

    process = models.ForeignKey(WebProcess, on_delete=models.CASCADE, related_name="uses")
    replica = models.ForeignKey(NodeModel, on_delete=models.CASCADE, related_name="uses")
    count = models.IntegerField(default=0)

    class Meta:
        db_table = "replica_uses"
        verbose_name, verbose_name_plural = "replica in use", "replicas in use"
        constraints = [
            models.UniqueConstraint(name="use_once", fields=["replica", "process"]),
            models.CheckConstraint(name="use_not_negative", condition=Q(count__gte=0)),
        ]

    def __str__(self) -> str:
        return f"{self.count}"
