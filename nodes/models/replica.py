"""Replicas of models on nodes, and the number of their requests per web process.

A row of `node_models` is one engine, from the reservation of its slot to the confirmed end of its process.
The table of the phases is `nodes/replicas/states.py`; only `nodes/replicas` writes the columns of a row's
life.
"""

import uuid
from collections.abc import Mapping
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Self, cast

from django.db import models
from django.db.models import Case, Exists, OuterRef, Q, QuerySet, Value, When

from localai_cluster.kit import clock
from localai_cluster.messaging.messages import process_key
from nodes.models.inventory import NodeBackend
from nodes.models.node import BackendNode
from operations.models import SUFFIX_SEPARATOR

ALL_REPLICAS_SUFFIX = "all"
"""Suffix of the key of an operation on all replicas of a model."""


class Phase(models.TextChoices):
    """Phase in the life of an engine (`nodes/replicas/states.py`). Only `serving` replicas get requests."""

    RESERVED = "reserved"
    STAGING = "staging"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    TERMINATING = "terminating"
    STOPPING = "stopping"
    DEPARTED = "departed"


class PhaseReason(models.TextChoices):
    """Reason why a replica no longer serves."""

    UNLOAD = "unload"
    UPGRADE = "upgrade"
    EVICTED = "evicted"
    REPLACED = "replaced"
    LOST = "lost"
    WRONG_MODEL = "wrong_model"
    LOAD_FAILED = "load_failed"
    NODE_LEFT = "node_left"


_FINAL_REASONS = frozenset({PhaseReason.EVICTED, PhaseReason.REPLACED, PhaseReason.WRONG_MODEL})
REASONS_BY_PHASE: Mapping[Phase, frozenset[PhaseReason]] = {
    Phase.DRAINING: frozenset({PhaseReason.UNLOAD, PhaseReason.UPGRADE, PhaseReason.LOST}),
    Phase.TERMINATING: _FINAL_REASONS | {PhaseReason.UNLOAD},
    Phase.STOPPING: _FINAL_REASONS | {PhaseReason.UNLOAD, PhaseReason.LOST, PhaseReason.LOAD_FAILED},
    Phase.DEPARTED: frozenset({PhaseReason.NODE_LEFT}),
}
"""The reasons that a replica in a phase may have; it has none in other phases."""


class OwnerKind(models.TextChoices):
    """Kind of the owner that moves a replica to its next phase."""

    OPERATION = "operation"
    INTENT = "intent"
    CONTROLLERS = "controllers"


class ReplicaState(models.TextChoices):
    """State of a replica in the API, which follows from its phase (R1.4).

    Only `loaded` replicas get requests.
    """

    STAGING = "staging"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    IDLE = "idle"


BEING_LOADED = (ReplicaState.STAGING, ReplicaState.LOADING)
"""States of replicas that a load owns."""
STATE_BY_PHASE: Mapping[str, str | None] = {
    Phase.RESERVED: ReplicaState.LOADING,
    Phase.STAGING: ReplicaState.STAGING,
    Phase.STARTING: ReplicaState.LOADING,
    Phase.SERVING: ReplicaState.LOADED,
    Phase.DRAINING: ReplicaState.UNLOADING,
    Phase.TERMINATING: ReplicaState.UNLOADING,
    Phase.STOPPING: ReplicaState.UNLOADING,
    Phase.DEPARTED: None,
}
"""State of each phase, as in the reference. A departed replica has no state and is never counted."""
LOADING_PHASES = tuple(phase for phase in Phase if STATE_BY_PHASE[phase] in BEING_LOADED)
"""Phases of replicas that a load owns, in order."""
_STATE_EXPRESSION = Case(
    *(When(phase=phase, then=Value(state)) for phase, state in STATE_BY_PHASE.items() if state is not None),
    output_field=models.CharField(max_length=16),
)
_FAILED_LOAD_CONDITION = Q(phase="stopping", reason="load_failed")

_UNMATCHED_LABELS_SUBQUERY = """
SELECT FROM model_scheduling_configs c
 CROSS JOIN jsonb_each(CASE WHEN jsonb_typeof(c.node_selector) = 'object' THEN c.node_selector
                            ELSE '{"unreadable": []}' END) AS wanted(key, value)
 WHERE c.model_name = node_models.model_name AND NOT EXISTS (
           SELECT FROM node_labels l WHERE l.node_id = node_models.node_id
              AND l.key = wanted.key AND to_jsonb(l.value) = wanted.value)
"""
"""Subquery: labels that the rule of the replica's model requires and its node lacks."""


class NodeModelQuerySet(QuerySet["NodeModel"]):
    """Filters of replicas. Each method returns a queryset; none of them writes."""

    def loaded(self) -> Self:
        """Filter replicas that may get requests."""
        return self.filter(state="loaded")

    def serving(self) -> Self:
        """Filter loaded replicas on healthy nodes (R1.61)."""
        return self.loaded().filter(node__status="healthy")

    def reached(self) -> Self:
        """Filter replicas that requests can get (R2.10), as `nodes/replicas/statements.py` does.

        Their nodes match the selector of their model's rule. Do not use it in subqueries.
        """
        return cast(Self, self.serving().extra(where=[f"NOT EXISTS ({_UNMATCHED_LABELS_SUBQUERY})"]))

    def of_backend(self, backend: str) -> Self:
        """Filter replicas whose engines use the backend with this name or alias on their node."""
        backend_type = OuterRef("backend_type")
        installed = NodeBackend.objects.named(backend).filter(node=OuterRef("node"))
        alias = installed.filter(Q(name__iexact=backend_type) | Q(alias__iexact=backend_type))
        return self.filter(Q(backend_type__iexact=backend) | Q(~Q(backend_type=""), Exists(alias)))

    def of(self, model_name: str) -> Self:
        """Filter replicas of one model."""
        return self.filter(model_name=model_name)

    def occupying(self) -> Self:
        """Filter replicas that occupy a slot of their node. Engines of failed loads do not (R1.62)."""
        return self.exclude(Q(phase="departed") | _FAILED_LOAD_CONDITION)


_EngineManager = models.Manager.from_queryset(NodeModelQuerySet)


class _PresentManager(_EngineManager["NodeModel"]):
    """Manager of replicas that have not departed."""

    def get_queryset(self) -> NodeModelQuerySet:
        """Return a queryset without departed replicas."""
        return cast(NodeModelQuerySet, super().get_queryset().exclude(phase="departed"))


def _phase_constraints() -> list[models.CheckConstraint]:
    """Return the check constraints between a replica's phase and the columns of its life."""
    unowned = Q(owner_kind="", owner_id__isnull=True)
    controllers = Q(owner_kind="controllers", owner_id__isnull=True)
    operation = Q(owner_kind="operation", owner_id__isnull=False)
    intent = Q(owner_kind="intent", owner_id__isnull=False)
    owners = {
        "serving": unowned,
        "draining": operation | intent | controllers,
        "terminating": operation | controllers,
        "stopping": operation | controllers,
        "departed": controllers,
    }
    loading, serving = Q(phase__in=LOADING_PHASES), Q(phase="serving")
    rules = {
        "owner": reduce(or_, (Q(phase=phase) & owner for phase, owner in owners.items()))
        | (loading & operation),
        "fence": (loading & Q(owner_fence__isnull=False)) | (~loading & Q(owner_fence__isnull=True)),
        "deadline": (serving & Q(deadline__isnull=True)) | (~serving & Q(deadline__isnull=False)),
        "reason": reduce(
            or_,
            (Q(phase=phase, reason__in=sorted(reasons)) for phase, reasons in REASONS_BY_PHASE.items()),
            (loading | serving) & Q(reason=""),
        ),
        "stops": Q(phase__in=("stopping", "departed"))
        | Q(next_stop_at__isnull=True, stop_attempts=0, stop_error=""),
        "claim": Q(claimed_until__isnull=True) | ~(loading | serving),
        "engine": ~Q(phase__in=("reserved", "staging")) | Q(started_at__isnull=True, address=""),
        "start": ~Q(phase="starting") | Q(started_at__isnull=False),
        "address": ~Q(phase__in=("serving", "draining", "terminating")) | ~Q(address=""),
        "requests": ~Q(phase="departed") | Q(in_flight=0),
    }
    return [
        models.CheckConstraint(name=f"replica_life_{name}", condition=rule) for name, rule in rules.items()
    ]


class NodeModel(models.Model):
    """A replica: one engine process that serves one model on one node (R1.4, R1.5).

    No cascade deletes a replica: a node is removed after its engines (`nodes/replicas/engines.py`).
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(BackendNode, on_delete=models.PROTECT, related_name="replicas")
    model_name = models.CharField(max_length=255)
    replica_index = models.IntegerField(default=0)
    address = models.CharField(max_length=512, blank=True, default="")
    phase = models.CharField(max_length=16, choices=Phase, default=Phase.RESERVED)
    state = models.GeneratedField(
        expression=_STATE_EXPRESSION, output_field=models.CharField(max_length=16, null=True), db_persist=True
    )
    """`ReplicaState` (R1.4), which PostgreSQL generates from the phase. It is null for a departed replica."""
    reason = models.CharField(max_length=16, choices=PhaseReason, blank=True, default="", db_default="")
    """Reason why the replica no longer serves; "" while it may serve."""
    owner_kind = models.CharField(max_length=16, choices=OwnerKind, blank=True, default="", db_default="")
    """Kind of the owner that moves the replica to its next phase; "" while it serves."""
    owner_id = models.UUIDField(null=True, blank=True)
    """Id of the operation or intent that owns the replica."""
    owner_fence = models.BigIntegerField(null=True, blank=True)
    """Fence of the load attempt that owns the replica; null in later phases."""
    deadline = models.DateTimeField(null=True, blank=True)
    """Deadline of the phase. `nodes/replicas/states.py` defines what happens then."""
    claimed_until = models.DateTimeField(null=True, blank=True)
    """Time until which one controller has claimed stopping the engine."""
    next_stop_at = models.DateTimeField(null=True, blank=True)
    """Time of the next stop command after one without confirmation."""
    stop_attempts = models.IntegerField(default=0, db_default=0)
    """Number of stop commands sent."""
    stop_error = models.CharField(max_length=240, blank=True, default="", db_default="")
    """The reason why the last stop command was not confirmed."""
    started_at = models.DateTimeField(null=True, blank=True)
    """Time of the start command; null while no engine can exist."""
    start_answered = models.BooleanField(default=False, db_default=False)
    """True after the worker has replied to the start command with an address or a refusal."""
    in_flight = models.IntegerField(default=0)
    last_used = models.DateTimeField(default=clock.now)
    """Time when the last request began, or when the replica was loaded (R1.57)."""
    last_released_at = models.DateTimeField(null=True, blank=True, editable=False)
    """Time when the last request ended. It determines when an idle replica is retired (R4.18)."""
    vram_needed = models.BigIntegerField(default=0, db_default=0)
    """Estimated bytes that the engine allocates; 0 = unknown. A load reserves them
    (`placement/memory.py`)."""
    vram_on_node = models.BooleanField(default=False, db_default=False)
    """True while `vram_needed` is part of the node's `reserved_vram`. The end of the load subtracts it."""
    vram_seen = models.BigIntegerField(default=0, db_default=0)
    """Available bytes of the node in the reading on which the placement is based."""
    gpus = models.JSONField(default=list, blank=True, db_default=[])
    """The GPUs that the engine may use, each with `index`, `uuid`, `bytes` (of the engine) and `seen` (as
    `vram_seen`).

    Empty if its node reports none, or its need is unknown.
    """
    files_needed = models.BigIntegerField(default=0, db_default=0)
    """Bytes of model files that the load brings to the node; 0 = none or unknown.

    They count toward the node's disk quota until the files are recorded (`decisions/fleet_cache.py`).
    """
    vram_seen_at = models.DateTimeField(null=True, blank=True)
    """Time of the reading in `vram_seen`; null without a reading."""
    loaded_at = models.DateTimeField(null=True, blank=True)
    """Time when the replica began to serve."""
    vram_alone = models.BooleanField(default=False, db_default=False)
    """True if, at the reservation, no other engine used its GPUs and no other load ran on its node."""
    measured_at = models.DateTimeField(null=True, blank=True)
    """Time when a reading of the engine's memory was stored in `ModelLoadInfo` or given up; null before."""
    backend_type = models.CharField(max_length=255, blank=True, default="")
    model_options = models.JSONField(default=dict, blank=True)
    config_revision = models.CharField(max_length=64, blank=True, default="")
    effective_options_hash = models.CharField(max_length=64, blank=True, default="")
    checked_at = models.DateTimeField(null=True, blank=True)
    """Start of a controller's last liveness check of the replica. Results of other checks are ignored."""
    missed_reports = models.PositiveSmallIntegerField(default=0, db_default=0)
    """Number of consecutive reports of the worker that lack the engine."""
    missed_probes = models.PositiveSmallIntegerField(default=0, db_default=0)
    """Number of consecutive probes of the engine's address without an answer."""
    exit_reported = models.BooleanField(default=False, db_default=False)
    """True if the worker has reported that the engine ended, which is not yet confirmed."""
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    objects = _PresentManager()
    """Manager of all replicas except departed ones, for clients, counters and hooks."""
    engines = _EngineManager()
    """Manager of all replicas including departed ones, for slots, memory and stops."""

    class Meta:
        db_table = "node_models"
        verbose_name, verbose_name_plural = "replica", "replicas"
        constraints = [
            models.UniqueConstraint(
                name="replica_once_a_slot", fields=["node", "model_name", "replica_index"]
            ),
            models.CheckConstraint(name="replica_in_flight_not_negative", condition=Q(in_flight__gte=0)),
            models.CheckConstraint(name="replica_index_not_negative", condition=Q(replica_index__gte=0)),
            models.CheckConstraint(name="replica_phase_known", condition=Q(phase__in=Phase.values)),
            models.CheckConstraint(
                name="replica_vram_not_negative", condition=Q(vram_needed__gte=0, vram_seen__gte=0)
            ),
            models.CheckConstraint(name="replica_files_not_negative", condition=Q(files_needed__gte=0)),
            *_phase_constraints(),
        ]
        indexes = [
            models.Index(fields=["model_name"], name="replica_model", condition=Q(state="loaded")),
            models.Index(fields=["phase"], name="replica_not_serving", condition=~Q(phase="serving")),
        ]

    def __str__(self) -> str:
        return self.process_key

    @property
    def process_key(self) -> str:
        """Key of the engine process on its worker."""
        return process_key(self.model_name, self.replica_index)

    @property
    def idle_since(self) -> datetime:
        """Time when the last request ended; without requests, the time when the replica was loaded."""
        return max(self.last_used, self.last_released_at or self.last_used)


class WebProcess(models.Model):
    """A running web process. If it falls silent, its in-flight counts are subtracted (`liveness.py`)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    started_at = models.DateTimeField(default=clock.now)
    seen_at = models.DateTimeField(default=clock.now)
    hearing_since = models.DateTimeField(default=clock.now)
    """Time since which the process has run without interruption.

    Missing heartbeats of nodes before that time prove nothing.
    """
    version = models.CharField(max_length=64, blank=True, db_default="")

    class Meta:
        db_table = "web_processes"
        verbose_name, verbose_name_plural = "web process", "web processes"

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class ReplicaUse(models.Model):
    """Number of requests that one web process runs on a replica.

    `NodeModel.in_flight` is the sum over all processes.
    """

    process = models.ForeignKey(WebProcess, on_delete=models.CASCADE, related_name="uses")
    replica = models.ForeignKey(NodeModel, on_delete=models.CASCADE, related_name="uses")
    count = models.IntegerField(default=0)

    class Meta:
        db_table = "replica_uses"
        verbose_name, verbose_name_plural = "replica use count", "replica use counts"
        constraints = [
            models.UniqueConstraint(name="use_once", fields=["replica", "process"]),
            models.CheckConstraint(name="use_not_negative", condition=Q(count__gte=0)),
        ]

    def __str__(self) -> str:
        return f"{self.count}"


def load_key(model_name: str, suffix: str = "0") -> str:
    """Return the key of an operation on a model's replicas. Operations with equal keys exclude each other.

    Requests join the load with suffix 0. A load of one more replica has another number, and operations on all
    replicas have `ALL_REPLICAS_SUFFIX`.
    """
    return f"model:{model_name}{SUFFIX_SEPARATOR}{suffix}"
