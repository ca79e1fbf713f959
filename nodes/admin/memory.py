"""Model load records, pending backend operations and scheduling rules."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from localai_cluster import clock
from localai_cluster.web.admin import ModelAdmin, Observed
from nodes.models import ModelLoadInfo, ModelSchedulingConfig, PendingBackendOp


@admin.register(ModelLoadInfo)
class ModelLoadInfoAdmin(Observed):
    """How models were last loaded."""

    list_display = ("model_name", "backend_type", "updated_at")
    list_filter = ("backend_type",)
    search_fields = ("model_name",)


@admin.register(PendingBackendOp)
class PendingBackendOpAdmin(Observed):
    """Backend operations that wait for their node."""

    list_display = ("node", "backend", "op", "attempts", "next_retry_at", "last_error")
    list_filter = ("op",)
    list_select_related = ("node",)


@admin.register(ModelSchedulingConfig)
class ModelSchedulingConfigAdmin(ModelAdmin):
    """Where and how often models run."""

    list_display = ("model_name", "min_replicas", "max_replicas", "spread_all", "unsatisfiable_until")
    readonly_fields = ("unsatisfiable_until", "unsatisfiable_ticks", "created_at", "updated_at")
    search_fields = ("model_name",)

    def save_model(self, request: HttpRequest, obj: ModelSchedulingConfig, form: Any, change: bool) -> None:
        """Stamps the change."""
        obj.updated_at = clock.now()
        super().save_model(request, obj, form, change)
