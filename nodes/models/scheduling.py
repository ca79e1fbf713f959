"""Scheduling rules, load records and prefix pressure of models, and the record of placement decisions.

The selector of a rule contains the labels that a node must have (R1.68, R1.69). Writers validate it. A stored
selector that is unreadable matches no node.
"""

import uuid
from datetime import datetime, timedelta
from functools import reduce
from operator import add
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from django.db import models
from django.db.models import BigIntegerField, F, Func, Q, Sum, Value, Window
from django.db.models.functions import Collate

from localai_cluster.kit import clock, errors, names


class ModelLoadInfo(models.Model):
    """The last load of a model (R1.6) and its engines' memory. It outlives replicas and nodes."""

    model_name = models.CharField(max_length=255, unique=True)
    backend_type = models.CharField(max_length=255)
    model_options = models.JSONField(default=dict)
    definition = models.JSONField(default=dict, db_default={}, editable=False)
    """Definition that the last load used (`nodes/loading/load_info.py`); empty if it cannot be stored."""
    withdrawn_at = models.DateTimeField(null=True, editable=False)
    """Time when a user deleted or disabled the definition. From then on this row starts no load."""
    memory = models.JSONField(default=list, db_default=[], editable=False)
    """Readings of the engines' memory, by definition, backend build and kind of device."""
    created_at = models.DateTimeField(default=clock.now, editable=False)
    updated_at = models.DateTimeField(default=clock.now, editable=False)

    class Meta:
        db_table = "model_load_infos"
        verbose_name, verbose_name_plural = "model load record", "model load records"
        constraints = [models.CheckConstraint(name="load_info_names_model", condition=~Q(model_name=""))]

    def __str__(self) -> str:
        return self.model_name


class RoutePolicy(models.TextChoices):
    """Policy by which a request gets a replica (R3.1); empty = the cluster's default."""

    ROUND_ROBIN = "round_robin", "round robin"
    PREFIX_CACHE = "prefix_cache", "prefix cache"


RULE_LOCK_ORDER = Collate("model_name", "C")
"""Order in which every transaction locks the rules of several models, against deadlocks.

It is the order of Python's `sorted`; the database's own collation may have another one.
"""


class ModelSchedulingConfig(models.Model):
    """Scheduling rule of a model: its allowed nodes and number of replicas (R1.8)."""

    id = models.UUIDField(primary_key=True, default=uuid4, editable=False)
    model_name = models.CharField(max_length=255, unique=True)
    node_selector = models.JSONField(default=dict, blank=True)
    min_replicas = models.IntegerField(default=0)
    max_replicas = models.IntegerField(default=0)
    spread_all = models.BooleanField(default=False)
    route_policy = models.CharField(max_length=32, blank=True, default="", choices=RoutePolicy)
    balance_abs_threshold = models.IntegerField(default=0)
    balance_rel_threshold = models.FloatField(default=0)
    min_prefix_match = models.FloatField(default=0)
    unsatisfiable_until = models.DateTimeField(null=True, blank=True, editable=False)
    unsatisfiable_ticks = models.IntegerField(default=0, editable=False)
    wanted_replicas = models.IntegerField(default=0, db_default=0, editable=False)
    current_replicas = models.IntegerField(default=0, db_default=0, editable=False)
    loading_replicas = models.IntegerField(default=0, db_default=0, editable=False)
    reason = models.TextField(blank=True, default="", db_default="", editable=False)
    """Result of the last replica pass for this rule, with its reason."""
    pressure_ended_at = models.DateTimeField(null=True, blank=True, editable=False)
    """Time of the last scale-up because of prefix pressure (R4.13). Earlier pressure no longer counts."""
    checked_at = models.DateTimeField(null=True, blank=True, editable=False)
    """Time of the last replica pass for this rule; null until a pass has processed its latest change."""
    failure_seq = models.BigIntegerField(null=True, blank=True, editable=False)
    """Number of the change (`Operation.seq`) that was the last failed load at that pass; 0 = there was none.

    Only a failure with a greater number is counted (R4.23). Null as `checked_at`.
    """
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
            models.CheckConstraint(
                name="scheduling_spread_counts_nothing",
                condition=Q(spread_all=False) | Q(min_replicas=0, max_replicas=0),
            ),
            models.CheckConstraint(
                name="scheduling_routing_valid",
                condition=Q(route_policy__in=["", *RoutePolicy.values])
                & Q(balance_abs_threshold__gte=0, min_prefix_match__range=(0, 1))
                & (Q(balance_rel_threshold=0) | Q(balance_rel_threshold__gte=1)),
            ),
        ]

    def __str__(self) -> str:
        return self.model_name


class PrefixPressure(models.Model):
    """Prefix pressure on a model in one web process (R3.18).

    It is the number of requests that did not go to the replica that caches their prompt, because that replica
    was too busy.
    """

    process_id = models.UUIDField()
    model_name = models.CharField(max_length=255)
    times = models.JSONField(default=list)
    """ISO 8601 times of these requests, as of the last report."""
    reported_at = models.DateTimeField(default=clock.now)

    class Meta:
        db_table = "prefix_pressures"
        verbose_name, verbose_name_plural = "pressure on a model", "pressure on models"
        constraints = [
            models.UniqueConstraint(name="pressure_once_a_process", fields=["model_name", "process_id"])
        ]

    def __str__(self) -> str:
        return f"{self.model_name}: {len(self.times)}"


class PlacementOutcome(models.TextChoices):
    """Outcome of a placement decision."""

    PLACED = "placed"
    WAITING = "waiting"
    REFUSED = "refused"
    EVICTED = "evicted"
    SCALED = "scaled"
    UNLOADING = "unloading"


class DecisionKind(models.TextChoices):
    """Kind of a decision, which determines how it is recomputed (`nodes/loading/load_explanation.py`)."""

    PLACEMENT = "placement"
    EVICTION = "eviction"
    ATTEMPT = "attempt"
    """The result of a failed load attempt."""
    SCALE = "scale"
    UNLOAD = "unload"


_Decision = TypeVar("_Decision", bound=models.Model)
_ROW_OVERHEAD_BYTES = 300
"""Estimated bytes of a row without its large columns, with its index entries."""


class BoundedQuerySet(models.QuerySet[_Decision]):
    """Base querysets of decision records, whose retention limits age and total bytes."""

    at: ClassVar[str]
    large_columns: ClassVar[tuple[str, ...]]
    """Names of large columns, whose compressed size counts. PostgreSQL knows it without reading the
    values."""

    def retention_cutoff(self, space: int) -> datetime | None:
        """Return the time from which on the rows fit into `space` bytes, None if all rows fit. One query."""
        bytes_field = BigIntegerField()
        sizes = (
            Func(F(name), function="pg_column_size", output_field=bytes_field) for name in self.large_columns
        )
        size = reduce(add, sizes, Value(_ROW_OVERHEAD_BYTES, output_field=bytes_field))
        newest_first = (F(self.at).desc(), F("id").desc())
        totals = self.annotate(total=Window(Sum(size), order_by=newest_first)).order_by(*newest_first)
        last: datetime | None = totals.filter(total__gt=space).values_list(self.at, flat=True).first()
        return last + timedelta(microseconds=1) if last is not None else None

    def prune(self, *, before: datetime, limit: int) -> int:
        """Delete up to `limit` rows older than `before`, oldest first. Return their number."""
        old = self.filter(**{f"{self.at}__lt": before}).order_by(self.at, "pk")
        return self.filter(pk__in=list(old.values_list("pk", flat=True)[:limit])).delete()[0]


class PlacementRecordQuerySet(BoundedQuerySet["PlacementRecord"]):
    """Records of decisions."""

    at, large_columns = "last_at", ("facts", "reason")


class PlacementLogQuerySet(BoundedQuerySet["PlacementLog"]):
    """Entries of the placement log."""

    at, large_columns = "at", ("body",)


class PlacementRecord(models.Model):
    """A placement decision, or a wait for as long as its reason stays (`nodes/placement/explain.py`).

    It stores the ids of operation and node without foreign keys, because it outlives both. `base` and
    `position` identify the log entry of its snapshot, which it may outlive too. A decision that compared no
    nodes has no snapshot.
    """

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(max_length=16, choices=DecisionKind, default=DecisionKind.PLACEMENT)
    model_name = models.CharField(max_length=255)
    operation_id = models.UUIDField(null=True, blank=True)
    at = models.DateTimeField()
    last_at = models.DateTimeField(help_text="when its figures were read")
    outcome = models.CharField(max_length=16, choices=PlacementOutcome)
    node_id = models.UUIDField(null=True, blank=True)
    node_name = models.CharField(max_length=255, blank=True, default="")
    replica_index = models.IntegerField(null=True, blank=True)
    reason = models.TextField()
    facts = models.JSONField(default=dict)
    base = models.UUIDField(null=True, blank=True)
    position = models.IntegerField(null=True, blank=True)

    objects = PlacementRecordQuerySet.as_manager()

    class Meta:
        db_table = "placement_records"
        verbose_name, verbose_name_plural = "placement record", "placement records"
        constraints = [
            models.CheckConstraint(
                name="placement_record_names_node",
                condition=~Q(outcome__in=["placed", "evicted"])
                | Q(node_id__isnull=False, replica_index__isnull=False),
            ),
        ]
        indexes = [
            models.Index(fields=["model_name", "-id"], name="placement_of_model"),
            models.Index(fields=["operation_id", "-id"], name="placement_of_operation"),
            models.Index(fields=["last_at"], name="placement_by_time"),
        ]

    def __str__(self) -> str:
        return f"{self.model_name}: {self.outcome}"


class PlacementLog(models.Model):
    """A snapshot of the fleet (`decision_log.py`).

    The one at position 0 of a base is complete; the following ones are deltas.
    """

    id = models.BigAutoField(primary_key=True)
    base = models.UUIDField(default=uuid.uuid4)
    position = models.IntegerField()
    at = models.DateTimeField()
    body = models.BinaryField()

    objects = PlacementLogQuerySet.as_manager()

    class Meta:
        db_table = "placement_log"
        verbose_name, verbose_name_plural = "entry of the placement log", "placement log"
        constraints = [models.UniqueConstraint(name="placement_log_position", fields=["base", "position"])]
        indexes = [models.Index(fields=["at"], name="placement_log_by_time")]

    def __str__(self) -> str:
        return f"{self.base}@{self.position}"


MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 128, 255
MAX_SELECTOR_LABELS = 64


def readable_selector(selector: Any) -> dict[str, str] | None:
    """Return the selector as labels, None if it is not an object of valid label texts."""
    try:
        return check_selector(selector)
    except errors.InvalidInput:
        return None


def check_selector(selector: Any) -> dict[str, str]:
    """Return the node selector; raise InvalidInput if it is invalid."""
    if not isinstance(selector, dict):
        raise errors.InvalidInput("node_selector must be an object of strings", field="node_selector")
    if len(selector) > MAX_SELECTOR_LABELS:
        raise errors.InvalidInput(
            f"node_selector must have at most {MAX_SELECTOR_LABELS} keys", field="node_selector"
        )
    for key, value in selector.items():
        check_label(key, value, "node_selector")
    return selector


def check_label(key: Any, value: Any, field: str) -> None:
    """Raise InvalidInput for `field` unless the key and the value form a valid label."""
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise errors.InvalidInput(f"{field}: a key must have 1 to {MAX_KEY_LENGTH} characters", field=field)
    _check_label_text(key, "a key", field)
    if not isinstance(value, str):
        raise errors.InvalidInput(f"{field}: the value of {key!r} must be a string", field=field)
    if len(value) > MAX_VALUE_LENGTH:
        raise errors.InvalidInput(
            f"{field}: the value of {key!r} exceeds {MAX_VALUE_LENGTH} characters", field=field
        )
    _check_label_text(value, f"the value of {key!r}", field)


def _check_label_text(text: str, subject: str, field: str) -> None:
    if character := names.find_unprintable(text):
        raise errors.InvalidInput(
            f"{field}: {subject} must not contain the character {character}", field=field
        )
