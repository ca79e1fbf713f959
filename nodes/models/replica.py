"""Replicas of models on nodes, and which web process carries how many of their requests."""

import uuid
from datetime import datetime
from typing import Self, cast

from django.db import models
from django.db.models import Exists, OuterRef, Q, QuerySet

from localai_cluster import clock
from nodes.models.inventory import NodeBackend
from nodes.models.node import BackendNode


class ReplicaState(models.TextChoices):
    """R1.4: only `loaded` rows receive traffic."""

    STAGING = "staging"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    IDLE = "idle"


BEING_LOADED = (ReplicaState.STAGING, ReplicaState.LOADING)
"""Rows of loads: their files are brought, or their engine loads."""

_NOT_CHOSEN = """
SELECT FROM model_scheduling_configs c
 CROSS JOIN jsonb_each(CASE WHEN jsonb_typeof(c.node_selector) = 'object' THEN c.node_selector
                            ELSE '{"unreadable": []}' END) AS wanted(key, value)
 WHERE c.model_name = node_models.model_name AND NOT EXISTS (
           SELECT FROM node_labels l WHERE l.node_id = node_models.node_id
              AND l.key = wanted.key AND to_jsonb(l.value) = wanted.value)
"""
"""A label that the rule of a replica's model wants and its node does not have."""


class NodeModelQuerySet(QuerySet["NodeModel"]):
    """Adjectives of replicas: each answers with a queryset, none of them writes."""

    def loaded(self) -> Self:
        """Rows that may receive traffic."""
        return self.filter(state="loaded")

    def serving(self) -> Self:
        """R1.61: loaded rows on healthy nodes."""
        return self.loaded().filter(node__status="healthy")

    def reached(self) -> Self:
        """Those of `serving` whose node the selector of their model's rule chooses, so that requests find
        them (R2.10), as in `nodes/replicas/statements.py`. Not for subqueries."""
        return cast(Self, self.serving().extra(where=[f"NOT EXISTS ({_NOT_CHOSEN})"]))

    def of_backend(self, backend: str) -> Self:
        """Replicas whose engines stop with this backend, also those started by another name of it there."""
        mine = OuterRef("backend_type")
        there = NodeBackend.objects.named(backend).filter(node=OuterRef("node"))
        same = there.filter(Q(name__iexact=mine) | Q(alias__iexact=mine))
        return self.filter(Q(backend_type__iexact=backend) | Q(~Q(backend_type=""), Exists(same)))

    def of(self, model_name: str) -> Self:
        """Replicas of one model."""
        return self.filter(model_name=model_name)


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
    """When the last request began, or the replica was loaded (R1.57)."""
    last_released_at = models.DateTimeField(null=True, blank=True, editable=False)
    """When the last request ended: idle replicas are retired by it (R4.18)."""
    loading_by = models.CharField(max_length=64, blank=True, default="")
    """Operation id and fence that own a row in `staging` or `loading`; of one in `unloading` the
    operation's id, or `eviction`."""
    vram_needed = models.BigIntegerField(default=0, db_default=0)
    """Bytes that its engine is estimated to allocate, 0 = not known; by the next two a load reserves them
    (`placement/reservations.py`)."""
    vram_on_node = models.BooleanField(default=False, db_default=False)
    """Whether its load added that to the node's `reserved_vram`, to be taken back if it fails."""
    vram_seen = models.BigIntegerField(default=0, db_default=0)
    """What its node had available by the reading that it was placed by."""
    gpus = models.JSONField(default=list, blank=True, db_default=[])
    """The GPUs that it was given, each with `index`, `uuid`, `bytes` (its share) and `seen` (as `vram_seen`).

    Empty if its node does not tell them, or what it needs is not known."""
    vram_seen_at = models.DateTimeField(null=True, blank=True)
    """When that reading came in; null = none was known."""
    loaded_at = models.DateTimeField(null=True, blank=True)
    """When its load was published."""
    withdrawn_for = models.UUIDField(null=True, blank=True)
    """The upgrade (its intent) that took it out of the picks: `unloading` until the upgrade is over."""
    backend_type = models.CharField(max_length=255, blank=True, default="")
    model_options = models.JSONField(default=dict, blank=True)
    config_revision = models.CharField(max_length=64, blank=True, default="")
    effective_options_hash = models.CharField(max_length=64, blank=True, default="")
    cleanup_error = models.CharField(max_length=240, blank=True, default="")
    cleanup_attempts = models.IntegerField(default=0)
    cleanup_next_retry_at = models.DateTimeField(null=True, blank=True)
    checked_at = models.DateTimeField(null=True, blank=True)
    """When a controller last took it to find out whether its engine lives; an outcome names that time."""
    missed_reports = models.PositiveSmallIntegerField(default=0, db_default=0)
    """How often in a row its worker did not list the engine."""
    missed_probes = models.PositiveSmallIntegerField(default=0, db_default=0)
    """How often in a row nothing answered at its address."""
    exit_reported = models.BooleanField(default=False, db_default=False)
    """Its worker said that the engine has ended, which has not been confirmed yet."""
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
                name="replica_vram_not_negative", condition=Q(vram_needed__gte=0, vram_seen__gte=0)
            ),
            models.CheckConstraint(
                name="replica_loaded_has_address", condition=~Q(state=ReplicaState.LOADED) | ~Q(address="")
            ),
        ]
        indexes = [
            models.Index(fields=["model_name"], name="replica_model", condition=Q(state="loaded")),
            models.Index(
                fields=["withdrawn_for"], name="replica_withdrawn", condition=Q(withdrawn_for__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model_name}#{self.replica_index}"

    @property
    def idle_since(self) -> datetime:
        """The end of its last request; without one, when it was loaded."""
        return max(self.last_used, self.last_released_at or self.last_used)


class WebProcess(models.Model):
    """One running web process; when it falls silent its in-flight counts are taken back (`nodes/health`)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    started_at = models.DateTimeField(default=clock.now)
    seen_at = models.DateTimeField(default=clock.now)
    hearing_since = models.DateTimeField(default=clock.now)
    """Since when it has been there without a gap: its silence before that says nothing."""
    version = models.CharField(max_length=64, blank=True, db_default="")

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
        verbose_name, verbose_name_plural = "replica use count", "replica use counts"
        constraints = [
            models.UniqueConstraint(name="use_once", fields=["replica", "process"]),
            models.CheckConstraint(name="use_not_negative", condition=Q(count__gte=0)),
        ]

    def __str__(self) -> str:
        return f"{self.count}"
