"""The registry in Django's admin.

Facts that workers and the cluster itself write are read-only here, nodes and replicas cannot be added by
hand, and what changes a node's state is an action that calls the same service as the API.
"""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from localai_cluster import clock, errors
from nodes import identity, services
from nodes.actors import of_principal
from nodes.models import (
    ApiKey,
    BackendNode,
    ModelLoadInfo,
    ModelSchedulingConfig,
    NodeLabel,
    NodeModel,
    PendingBackendOp,
    ReplicaUse,
    WebProcess,
)
from operations.admin import ModelAdmin, Observed, TabularInline


class NodeLabelInline(TabularInline):
    """A node's labels; one made here is the admin's and survives the worker's registrations."""

    model = NodeLabel
    extra = 0
    readonly_fields = ("source",)


@admin.register(BackendNode)
class BackendNodeAdmin(ModelAdmin):
    """Nodes: labels can be edited, everything else has its own route."""

    list_display = (
        "name",
        "node_type",
        "status",
        "weak_identity",
        "address",
        "last_heartbeat",
        "approved_by",
    )
    list_filter = ("status", "node_type", "weak_identity")
    search_fields = ("name", "address")
    actions = ("approve",)
    inlines = (NodeLabelInline,)
    exclude = ("auth_user", "api_key")

    def get_readonly_fields(self, request: HttpRequest, obj: BackendNode | None = None) -> tuple[str, ...]:
        """All of a node's own columns: status, figures, heartbeat and identity are not typed in by hand."""
        return tuple(field.name for field in BackendNode._meta.fields if field.name not in self.exclude)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """A node is made by its worker's registration."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: BackendNode | None = None) -> bool:
        """Removing a node is more than its row."""
        return False

    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        """A label that an admin touched is the admin's from now on."""
        for label in formset.forms:
            if label.has_changed():
                label.instance.source = NodeLabel.Source.ADMIN
        super().save_formset(request, form, formset, change)

    @admin.action(description="Approve the selected nodes", permissions=["change"])
    def approve(self, request: HttpRequest, queryset: QuerySet[BackendNode]) -> None:
        """Approves pending nodes, each by the service that the API uses."""
        actor = of_principal(identity.of_user(request.user))
        for node in queryset:
            try:
                services.approve(node.id, actor=actor, now=clock.now())
            except errors.ClusterError as refusal:
                self.message_user(request, f"Node {node.name}: {refusal.message}", messages.ERROR)
            else:
                self.message_user(request, f"Node {node.name}: approved", messages.SUCCESS)


@admin.register(NodeModel)
class NodeModelAdmin(Observed):
    """Replicas."""

    list_display = ("model_name", "replica_index", "node", "state", "in_flight", "backend_type", "last_used")
    list_filter = ("state", "backend_type")
    list_select_related = ("node",)
    search_fields = ("model_name", "node__name")


@admin.register(NodeLabel)
class NodeLabelAdmin(Observed):
    """All labels at a glance; they are edited on their node."""

    list_display = ("node", "key", "value", "source")
    list_filter = ("source",)
    list_select_related = ("node",)
    search_fields = ("key", "value", "node__name")


@admin.register(ModelLoadInfo)
class ModelLoadInfoAdmin(Observed):
    """How models were last loaded."""

    list_display = ("model_name", "backend_type", "updated_at")
    list_filter = ("backend_type",)
    search_fields = ("model_name",)


@admin.register(PendingBackendOp)
class PendingBackendOpAdmin(Observed):
    """Intents."""

    list_display = ("node", "backend", "op", "attempts", "next_retry_at", "last_error")
    list_filter = ("op",)
    list_select_related = ("node",)


@admin.register(ModelSchedulingConfig)
class ModelSchedulingConfigAdmin(ModelAdmin):
    """Where and how often models shall run."""

    list_display = ("model_name", "min_replicas", "max_replicas", "spread_all", "unsatisfiable_until")
    readonly_fields = ("unsatisfiable_until", "unsatisfiable_ticks", "created_at", "updated_at")
    search_fields = ("model_name",)

    def save_model(self, request: HttpRequest, obj: ModelSchedulingConfig, form: Any, change: bool) -> None:
        """Stamps the change."""
        obj.updated_at = clock.now()
        super().save_model(request, obj, form, change)


@admin.register(ApiKey)
class ApiKeyAdmin(ModelAdmin):
    """Users' keys: the plaintext is shown once, when a key is made."""

    list_display = ("name", "prefix", "user", "created_at", "revoked_at")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter),)
    list_select_related = ("user",)
    readonly_fields = ("prefix", "created_at")

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> tuple[str, ...]:
        """A key stays its user's."""
        return ("prefix", "created_at") if obj is None else ("user", "prefix", "created_at")

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Makes the key and shows its plaintext, or stores a revocation."""
        if change:
            super().save_model(request, obj, form, change)
            return
        made, plain = identity.create_api_key(obj.user, obj.name)
        obj.pk, obj.prefix, obj.key_hash = made.pk, made.prefix, made.key_hash
        self.message_user(request, f"The key, shown only now: {plain}", messages.WARNING)


@admin.register(WebProcess)
class WebProcessAdmin(Observed):
    """Running web processes."""

    list_display = ("host", "pid", "started_at", "seen_at")


@admin.register(ReplicaUse)
class ReplicaUseAdmin(Observed):
    """Which web process carries how many requests of a replica."""

    list_display = ("replica", "process", "count")
    list_select_related = ("replica", "process")
