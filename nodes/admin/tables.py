"""Read-only lists of rows that workers and the control plane write, and editable join tokens."""

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import of_principal
from localai_cluster.kit import clock, errors
from localai_cluster.web.admin import Observed, ObservedInline
from nodes import models
from nodes.models import DefinitionRevision, JoinToken, ModelDefinition, NodeModel, PlacementLog
from nodes.models.replica import NodeModelQuerySet
from nodes.registry import joining

if TYPE_CHECKING:  # generic for the type checker only
    TokenModelForm = forms.ModelForm[JoinToken]
else:
    TokenModelForm = forms.ModelForm

_MAX_SHOWN_BYTES = 4000
"""Maximum bytes that the page shows of a placement log entry."""


class JoinTokenForm(TokenModelForm):
    """Note, expiry and maximum number of nodes of a join token."""

    class Meta:
        model = JoinToken
        fields = ("note", "expires_at", "max_uses")

    def changes(self) -> dict[str, Any]:
        """Return the values that the user has changed, by column."""
        return {name: self.cleaned_data[name] for name in self.changed_data if name in self.cleaned_data}

    def clean(self) -> dict[str, Any]:
        """Lock the token until the transaction ends. Show a refusal of the registry at its field."""
        values = super().clean() or self.cleaned_data
        try:
            joining.check_change(self.instance.pk, self.changes(), clock.now())
        except errors.ClusterError as refusal:
            raise ValidationError({refusal.field or NON_FIELD_ERRORS: f"{refusal.message}."}) from None
        return values


@admin.register(JoinToken)
class JoinTokenAdmin(Observed):
    """Admin of join tokens; the pages, REST and the command line create them."""

    form = JoinTokenForm
    list_display = ("__str__", "state", "uses", "max_uses", "expires_at", "created_by", "last_used_by")
    search_fields = ("note", "created_by", "last_used_by")
    date_hierarchy = "created_at"
    show_full_result_count = False
    actions = ("revoke",)
    fields = (
        *("id", "note", "state", ("uses", "max_uses"), ("created_at", "created_by"), "expires_at"),
        *(("revoked_at", "revoked_by"), ("last_used_at", "last_used_by")),
    )
    readonly_fields = (
        *("id", "state", "uses", "created_at", "created_by"),
        *("revoked_at", "revoked_by", "last_used_at", "last_used_by"),
    )

    @admin.display(description="state")
    def state(self, token: JoinToken) -> str:
        """Return the token's state: usable, used up, expired or revoked."""
        return joining.state(token, clock.now()).replace("_", " ")

    def has_change_permission(self, request: HttpRequest, obj: JoinToken | None = None) -> bool:
        """Return True for users who may change join tokens; a revoked token cannot be edited."""
        is_revoked = obj is not None and obj.revoked_at is not None
        return not is_revoked and request.user.has_perm("nodes.change_jointoken")

    def save_model(self, request: HttpRequest, obj: JoinToken, form: Any, change: bool) -> None:
        """Save the changes through their service function."""
        actor = of_principal(principals.of_user(request.user))
        joining.change(obj.pk, form.changes(), actor=actor, now=clock.now())

    @admin.action(description="Revoke selected join tokens", permissions=["change"])
    def revoke(self, request: HttpRequest, tokens: QuerySet[JoinToken]) -> None:
        """Revoke the tokens: they admit no new node any more."""
        actor = of_principal(principals.of_user(request.user))
        token_ids = list(tokens.values_list("pk", flat=True))
        for token_id in token_ids:
            joining.revoke(token_id, actor=actor, now=clock.now())
        messages.success(request, f"Revoked: {len(token_ids)}. Nodes that joined with them stay.")


@admin.register(NodeModel)
class NodeModelAdmin(Observed):
    """Admin of replicas, and of the engines of nodes that have left; read-only."""

    list_display = (
        *("model_name", "replica_index", "node", "phase", "reason", "deadline", "stop_error"),
        *("in_flight", "backend_type", "last_used"),
    )
    list_filter = ("phase", "reason", "backend_type")
    search_fields = ("model_name", "node__name")

    def get_queryset(self, request: HttpRequest) -> NodeModelQuerySet:
        """Include the departed rows."""
        return NodeModel.engines.all()


class RevisionInline(ObservedInline):
    """The revisions of a definition without their texts, read-only."""

    model = DefinitionRevision
    fields = readonly_fields = ("number", "actor", "origin", "reason", "at")
    ordering = ("-number",)


@admin.register(ModelDefinition)
class ModelDefinitionAdmin(Observed):
    """Admin of stored definitions, read-only; the pages, REST and the command line change them."""

    list_display = ("name", "origin", "revision", "disabled", "updated_at", "deleted_at")
    list_filter = ("origin", "disabled")
    search_fields = ("name",)
    inlines = (RevisionInline,)


@admin.register(PlacementLog)
class PlacementLogAdmin(Observed):
    """Admin of the snapshots that placement decisions used; `manage.py placement again` reads them."""

    list_display = ("base", "position", "at", "size")
    search_fields = ("base",)
    fields = ("base", "position", "at", "size", "entry")
    show_full_result_count = False
    ordering = ("-id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[PlacementLog]:
        """Exclude the column of the entries, which may be large."""
        rows: QuerySet[PlacementLog] = super().get_queryset(request)
        return rows.defer("body").annotate(bytes=Length("body"))

    @admin.display(description="bytes")
    def size(self, row: PlacementLog) -> int:
        """Return the size of the entry."""
        return int(getattr(row, "bytes", 0))

    @admin.display
    def entry(self, row: PlacementLog) -> str:
        """Return the beginning of the entry."""
        return bytes(row.body[:_MAX_SHOWN_BYTES]).decode(errors="replace")


admin.site.register(
    models.NodeEvent,
    Observed,
    list_display=(
        "at",
        "node_name",
        "kind",
        "actor",
        "cause",
        "status_before",
        "status_after",
        "count",
        "detail",
    ),
    list_filter=("kind", "actor_kind"),
    search_fields=("node_name", "actor", "cause", "request_id"),
    date_hierarchy="at",
    show_full_result_count=False,
)
admin.site.register(
    models.NodeConflict,
    Observed,
    list_display=(
        *("kind", "node", "state", "source_address", "advertised_address", "node_source_address"),
        *("count", "last_at", "decided_by"),
    ),
    list_filter=("state", "kind"),
    search_fields=("node__name", "source_address", "advertised_address", "claimed_name"),
    show_full_result_count=False,
)
admin.site.register(
    models.RevokedSecret,
    Observed,
    list_display=("fingerprint", "node_name", "revoked_at", "revoked_by"),
    search_fields=("fingerprint", "node_name", "revoked_by"),
    date_hierarchy="revoked_at",
    show_full_result_count=False,
    ordering=("-revoked_at",),
)
admin.site.register(
    models.BusCredential,
    Observed,
    list_display=("public_key", "node_id", "issued_at", "expires_at", "revoked_at"),
    search_fields=("public_key", "node_id"),
)
admin.site.register(
    models.NodeBackend,
    Observed,
    list_display=("name", "node", "version", "is_system", "is_meta", "installed_at"),
    list_filter=("is_system", "is_meta"),
    search_fields=("name", "node__name"),
)
admin.site.register(
    models.PendingBackendOp,
    Observed,
    list_display=("backend", "op", "node", "attempts", "next_retry_at", "last_error", "lease_owner"),
    list_filter=("op",),
    search_fields=("backend", "node__name"),
    ordering=("backend", "created_at", "pk"),
)
admin.site.register(
    models.BackendOffer,
    Observed,
    list_display=("name", "version", "uri", "digest", "automatic_to"),
    search_fields=("name",),
)
admin.site.register(models.GalleryCopy, Observed, list_display=("key", "read_at"))
admin.site.register(
    models.UpgradeCheck,
    Observed,
    list_display=("id", "checked_at", "requested", "completed", "claimed_by", "claimed_until", "revision"),
)
admin.site.register(models.MassSilence, Observed, list_display=("__str__", "since", "until"))
admin.site.register(
    models.ModelSchedulingConfig,
    Observed,
    list_display=(
        *("model_name", "min_replicas", "max_replicas", "spread_all", "wanted_replicas"),
        *("current_replicas", "unsatisfiable_until", "reason"),
    ),
    search_fields=("model_name",),
)
admin.site.register(
    models.DefinitionRevision,
    Observed,
    list_display=("definition", "number", "actor", "origin", "reason", "at"),
    list_filter=("origin",),
    search_fields=("definition__name", "actor"),
    date_hierarchy="at",
    show_full_result_count=False,
    ordering=("-id",),
)
admin.site.register(
    models.PlacementRecord,
    Observed,
    list_display=(
        *("model_name", "kind", "outcome", "node_name", "replica_index", "reason", "at", "last_at"),
    ),
    list_filter=("kind", "outcome"),
    search_fields=("model_name", "node_name", "operation_id"),
    date_hierarchy="at",
    show_full_result_count=False,
    ordering=("-id",),
)
admin.site.register(
    models.ModelLoadInfo,
    Observed,
    list_display=("model_name", "backend_type", "updated_at"),
    list_filter=("backend_type",),
    search_fields=("model_name",),
)
admin.site.register(
    models.PrefixPressure,
    Observed,
    list_display=("model_name", "process_id", "times", "reported_at"),
    search_fields=("model_name",),
)
admin.site.register(
    models.WebProcess, Observed, list_display=("host", "pid", "version", "started_at", "seen_at")
)
admin.site.register(
    models.ReplicaUse,
    Observed,
    list_display=("replica", "process", "count"),
)
admin.site.register(
    models.BroughtModel,
    Observed,
    list_display=("model_name", "node", "size", "seen_at"),
    search_fields=("model_name",),
)
admin.site.register(
    models.UnreachedSource,
    Observed,
    list_display=("host", "node", "seen_at"),
    search_fields=("host",),
)
admin.site.register(
    models.StoredResponse,
    Observed,
    # What people write to models is not for administrators.
    fields=("id", "owner", "previous_id", "created_at", "used_at", "size"),
    list_display=("id", "owner", "previous_id", "created_at", "used_at", "size"),
    search_fields=("id", "owner"),
    show_full_result_count=False,
)
admin.site.register(
    models.FileHash,
    Observed,
    list_display=("path", "sha256", "hashed_at"),
    search_fields=("path", "sha256"),
)
