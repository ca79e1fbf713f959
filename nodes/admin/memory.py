"""Model load records, scheduling rules, and the reasons of placement."""

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest

from localai_cluster.kit import clock, errors
from localai_cluster.web.admin import ModelAdmin, Observed
from nodes.models import (
    ModelLoadInfo,
    ModelSchedulingConfig,
    NodeSample,
    PlacementLog,
    PlacementRecord,
    PrefixPressure,
)
from nodes.scheduling import store
from nodes.scheduling.rules import Rule, check_rule

if TYPE_CHECKING:  # generic for the type checker only
    RuleModelForm = forms.ModelForm[ModelSchedulingConfig]
else:
    RuleModelForm = forms.ModelForm

_SHOWN = 4000
"""Characters of an entry of the placement log."""
_FIELDS = (
    "model_name",
    "node_selector",
    "min_replicas",
    "max_replicas",
    "spread_all",
    "route_policy",
    "balance_abs_threshold",
    "balance_rel_threshold",
    "min_prefix_match",
)


@admin.register(ModelLoadInfo)
class ModelLoadInfoAdmin(Observed):
    """How models were last loaded."""

    list_display = ("model_name", "backend_type", "updated_at")
    list_filter = ("backend_type",)
    search_fields = ("model_name",)


@admin.register(PlacementRecord)
class PlacementRecordAdmin(Observed):
    """Why loads were placed where they are, or wait."""

    list_display = ("model_name", "kind", "outcome", "node_name", "replica_index", "reason", "at", "last_at")
    list_filter = ("kind", "outcome")
    search_fields = ("model_name", "node_name", "operation_id")
    date_hierarchy = "at"
    show_full_result_count = False
    ordering = ("-id",)


@admin.register(NodeSample)
class NodeSampleAdmin(Observed):
    """The memory of nodes over the last hour."""

    list_display = ("node_id", "at", "vram_used", "ram_used")
    search_fields = ("node_id",)
    show_full_result_count = False
    ordering = ("-id",)


@admin.register(PlacementLog)
class PlacementLogAdmin(Observed):
    """What decisions of placement saw: bases and their logs. `manage.py placement again` reads them."""

    list_display = ("base", "position", "at", "size")
    search_fields = ("base",)
    fields = ("base", "position", "at", "size", "entry")
    show_full_result_count = False
    ordering = ("-id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[PlacementLog]:
        """Without the entries: a list of them may be large."""
        rows: QuerySet[PlacementLog] = super().get_queryset(request)
        return rows.defer("body").annotate(bytes=Length("body"))

    @admin.display(description="bytes")
    def size(self, row: PlacementLog) -> int:
        """Of the entry."""
        return int(getattr(row, "bytes", 0))

    @admin.display
    def entry(self, row: PlacementLog) -> str:
        """The beginning of it."""
        return bytes(row.body[:_SHOWN]).decode(errors="replace")


@admin.register(PrefixPressure)
class PrefixPressureAdmin(Observed):
    """Requests that were kept from the replica that remembers their prompt, by web process."""

    list_display = ("model_name", "process_id", "times", "reported_at")
    search_fields = ("model_name",)


class RuleForm(RuleModelForm):
    """A rule as REST would take it."""

    def clean_node_selector(self) -> Any:
        """Nothing typed in means no selector."""
        selector = self.cleaned_data["node_selector"]
        return {} if selector is None else selector

    def clean(self) -> dict[str, Any]:
        """The judge of all rules."""
        told = {name: getattr(self.instance, name) for name in _FIELDS} | self.cleaned_data
        if not self.errors:
            try:
                check_rule(Rule(**told))
            except errors.InvalidInput as refusal:
                self.add_error(refusal.field if refusal.field in self.fields else None, refusal.message)
        return self.cleaned_data


@admin.register(ModelSchedulingConfig)
class ModelSchedulingConfigAdmin(ModelAdmin):
    """Where and how often models shall run; written by the service that REST calls."""

    form = RuleForm
    list_display = (
        "model_name",
        "min_replicas",
        "max_replicas",
        "spread_all",
        "wanted_replicas",
        "current_replicas",
        "unsatisfiable_until",
        "reason",
    )
    flags = (
        "wanted_replicas",
        "current_replicas",
        "loading_replicas",
        "reason",
        "looked_at",
        "pressure_ended_at",
        "unsatisfiable_until",
        "unsatisfiable_ticks",
        "created_at",
        "updated_at",
    )
    fields = (*_FIELDS, *flags)
    search_fields = ("model_name",)

    def get_readonly_fields(
        self, request: HttpRequest, obj: ModelSchedulingConfig | None = None
    ) -> tuple[str, ...]:
        """The model of a rule stays: another one has a rule of its own."""
        return self.flags if obj is None else ("model_name", *self.flags)

    def save_model(self, request: HttpRequest, obj: ModelSchedulingConfig, form: Any, change: bool) -> None:
        """Sets the rule."""
        rule = Rule(**{name: getattr(obj, name) for name in _FIELDS})
        obj.pk = store.set_rule(rule, clock.now())["id"]

    def delete_model(self, request: HttpRequest, obj: ModelSchedulingConfig) -> None:
        """Deletes the rule."""
        store.delete_rule(obj.model_name, clock.now())

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[ModelSchedulingConfig]) -> None:
        """Deletes those rules."""
        for name in queryset.order_by("model_name").values_list("model_name", flat=True):
            store.delete_rule(name, clock.now())
