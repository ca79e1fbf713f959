"""The node list and the node page.

The list counts replicas and requests in the statement that reads the nodes. On the page everything that
workers and the registry write is read-only; overrides and labels go through the services (`editing.py`), so
that a save writes the columns it means and never the row; what changes a node's state is a verb with a
page of its own (`verbs.py`, `confirm.py`).
"""

from typing import Any
from uuid import UUID

from django.contrib import admin
from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import Actor, of_principal
from localai_cluster.kit import clock
from localai_cluster.kit.nkeys import grouped
from localai_cluster.web.admin import Observed
from nodes.admin import filters, words
from nodes.admin.confirm import VerbAdmin
from nodes.admin.editing import LabelFormSet, LabelInline, NodeForm
from nodes.admin.facts import NodeDisplay, hardware
from nodes.admin.history import open_conflicts
from nodes.admin.seen import newest_event
from nodes.admin.verbs import NODE_VERBS, Verb
from nodes.admin.wide import Wide
from nodes.models import BackendNode, NodeConflict, NodeLabel
from nodes.registry import services
from nodes.registry.shape import LIVE_NODE

_STATE = ("state", "work", "heard", "approval")
_IF_SO = {
    "rejection": "rejected_at",
    "revocation": "revoked_at",
    "drain": "drained_at",
    "absence": "offline_at",
    "health": "unhealthy_at",
    "file_port": "file_port_failed_at",
}
"""NodeDisplay that are shown if they hold, and the column that says so."""
_IDENTITY = ("proof", "secret", "bound", "rotation", "joined", "source_address", "instance")
_MACHINE = ("kind", "address", "http_address", "version", "capability", "gpus_shown")
_RECORD = ("id", "first_seen", "revision_shown")
_IN_OTHER_WORDS = {
    "id",
    "name",
    "node_type",
    "status",
    "total_vram",
    "available_vram",
    "reserved_vram",
    "total_ram",
    "available_ram",
    "total_disk",
    "available_disk",
    "gpu_vendor",
    "gpu_compute_capability",
    "max_replicas_per_model",
    "max_replicas_per_model_manually_set",
    "vram_budget",
    "vram_budget_bytes",
    "vram_budget_manually_set",
    "weak_identity",
    "last_heartbeat",
    "created_at",
    "revision",
    "rejected",
    "revoked",
    "drain",
    "file_port",
    "inventory_at",
    "fingerprint",
    "rotation_requested_at",
    "worker_version",
}
"""Keys of a node's shape that the page shows in its own words."""
_ELSE = tuple(
    name for name in LIVE_NODE.columns if name not in _IN_OTHER_WORDS and name not in (*_IDENTITY, *_MACHINE)
)
"""The other columns of the shape: a new one is on the page without a line here."""
_OVERRIDES = ("override_cap", "cap", "override_budget", "budget")
_OVERRIDES_SHOWN = ("cap_shown", "budget_shown")
Button = tuple[Verb, str]
"""A verb and where its page is."""

_OVERRIDING = (
    "Overrides take precedence over the worker's values. Clear the checkbox to reset: the worker's own value"
    " applies again from its next registration."
)


def _open_conflicts() -> Coalesce:
    """Annotation: how many claims are open."""
    undecided = NodeConflict.objects.filter(node=OuterRef("pk"), state=NodeConflict.State.OPEN)
    count = undecided.order_by().values("node").annotate(count=Count("pk")).values("count")
    return Coalesce(Subquery(count), 0)


@admin.register(BackendNode)
class BackendNodeAdmin(Wide, NodeDisplay, VerbAdmin):
    """Nodes."""

    verbs = NODE_VERBS
    form = NodeForm
    inlines = (LabelInline,)
    change_form_template = "admin/nodes/node.html"
    list_display = (
        "name",
        "kind",
        "state",
        "proof",
        "address",
        "beat",
        "approved_by",
    )
    list_filter = (
        filters.StatusFilter,
        filters.TypeFilter,
        filters.LabelFilter,
        filters.VendorFilter,
        filters.IdentityFilter,
        filters.ConflictFilter,
        filters.DecisionFilter,
    )
    search_fields = ("name", "address")
    search_help_text = "Name or address"
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[BackendNode]:
        """Nodes with what runs on them; two statements for any number."""
        return BackendNode.objects.with_counts().annotate(open_conflicts=_open_conflicts()).order_by("name")

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> BackendNode | None:
        """The node with its newest event, both as of one moment."""
        try:
            pk = UUID(object_id)
        except ValueError:
            return None
        return self.get_queryset(request).annotate(newest_event=newest_event()).filter(pk=pk).first()

    def has_add_permission(self, request: HttpRequest) -> bool:
        """A node is made by its worker's registration."""
        return False

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Removing a node is more than deleting its row: it is the verb."""
        node = self.get_object(request, object_id)
        if node is None:
            return self.gone(request)
        return HttpResponseRedirect(reverse("admin:nodes_backendnode_remove", args=[node.pk]))

    def get_fieldsets(self, request: HttpRequest, obj: BackendNode | None = None) -> Any:
        """What is known, and what may be set; to a viewer the overrides are facts, too."""
        overrides = _OVERRIDES if self.has_change_permission(request, obj) else _OVERRIDES_SHOWN
        holding = [name for name, column in _IF_SO.items() if obj and getattr(obj, column)]
        return (
            ("State", {"fields": (*_STATE, *holding)}),
            (
                "Overrides",
                {"fields": overrides, "description": _OVERRIDING},
            ),
            ("Identity", {"fields": _IDENTITY}),
            ("Machine", {"fields": (*_MACHINE, *_ELSE)}),
            ("Record", {"fields": _RECORD, "classes": ("collapse",)}),
        )

    def get_readonly_fields(self, request: HttpRequest, obj: BackendNode | None = None) -> tuple[str, ...]:
        """Everything that is not an override."""
        return (*_STATE, *_IF_SO, *_IDENTITY, *_MACHINE, *_ELSE, *_RECORD, *_OVERRIDES_SHOWN)

    @admin.display(description="revision")
    def revision_shown(self, node: BackendNode) -> int:
        """Moves with every change but heartbeats."""
        return node.revision

    def render_change_form(
        self,
        request: HttpRequest,
        context: Any,
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: BackendNode | None = None,
    ) -> HttpResponse:
        """Adds the panels: approval, conflicts, buttons."""
        if obj is not None:
            context.update(_panels(request, obj), **self._buttons(request, obj), show_delete=False)
        return super().render_change_form(request, context, add, change, form_url, obj)

    def save_model(self, request: HttpRequest, obj: BackendNode, form: Any, change: bool) -> None:
        """Hands overrides to the services; the row itself is never saved."""
        now, actor = clock.now(), _actor(request)
        if form.asks_for_cap():
            _set_cap(obj.pk, form.cleaned_data, actor=actor, now=now)
        if form.asks_for_budget():
            _set_budget(obj.pk, form.cleaned_data, actor=actor, now=now)

    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        """Hands the labels to the service, as one change."""
        assert isinstance(formset, LabelFormSet)
        formset.save(commit=False)
        wanted, dropped = formset.wanted(), formset.dropped()
        if wanted or dropped:
            services.edit_labels(
                form.instance.pk, wanted, drop=dropped, actor=_actor(request), now=clock.now()
            )

    def _buttons(self, request: HttpRequest, node: BackendNode) -> dict[str, list[Button]]:
        """The verbs that apply to the node and that the user may use; those of the approval by themselves."""
        usable = [verb for verb in self.verbs if self.allowed(request, verb) and not verb.refusal(node)]
        found: dict[str, list[Button]] = {"approval_buttons": [], "buttons": []}
        for verb in usable:
            place = "approval_buttons" if verb.name in ("approve", "reject") else "buttons"
            url = reverse(f"admin:nodes_backendnode_{verb.name}", args=[node.pk])
            found[place].append((verb, url))
        return found


def _set_cap(node_id: UUID, asked: dict[str, Any], **by: Any) -> None:
    if asked["override_cap"]:
        services.set_replica_cap(node_id, asked["cap"], **by)
    else:
        services.reset_replica_cap(node_id, **by)


def _set_budget(node_id: UUID, asked: dict[str, Any], **by: Any) -> None:
    if asked["override_budget"]:
        services.set_vram_budget(node_id, asked["budget"], **by)
    else:
        services.reset_vram_budget(node_id, **by)


def _actor(request: HttpRequest) -> Actor:
    return of_principal(principals.of_user(request.user))


def _panels(request: HttpRequest, node: Any) -> dict[str, Any]:
    now = clock.now()
    return {
        "node": node,
        "hardware": hardware(node),
        "first_seen": words.moment(node.created_at, now),
        "heard": words.moment(node.last_heartbeat, now),
        "fingerprint": grouped(node.fingerprint),
        "conflicts": open_conflicts(node, may_decide=request.user.has_perm("nodes.change_nodeconflict")),
        "page_url": f"/app/nodes/{node.pk}",
        "events_url": reverse("admin:nodes_nodeevent_changelist") + f"?node={node.pk}",
    }


@admin.register(NodeLabel)
class NodeLabelAdmin(Observed):
    """All labels at a glance; they are edited on their node."""

    list_display = ("node", "key", "value", "source")
    list_filter = ("source",)
    list_select_related = ("node",)
    search_fields = ("key", "value", "node__name")
