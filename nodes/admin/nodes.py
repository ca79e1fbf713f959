"""Django's admin for nodes: the list, approval and overrides.

Each form contains the revision of the node that it shows. If the node has changed since, nothing is written,
and the error message describes the last change. The admin saves no row itself; it calls the same services as
the REST API.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.core import signing
from django.core.exceptions import BadRequest, ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import Actor, of_principal
from localai_cluster.kit import clock, errors, names
from localai_cluster.kit.nkeys import group_characters
from localai_cluster.web.admin import ModelAdmin, Observed, ObservedInline
from nodes.models import BackendNode, NodeEvent, NodeLabel
from nodes.registry import actions, bulk, lifecycle, overrides, resources
from nodes.registry.actions import Action
from nodes.registry.change import lock_node
from nodes.registry.states import FACT_COLUMNS

if TYPE_CHECKING:  # generic for the type checker only
    NodeModelForm = forms.ModelForm[BackendNode]
else:
    NodeModelForm = forms.ModelForm

MAX_SELECTED_NODES = 500
MAX_REFUSALS_SHOWN = 20
REVISIONS_SALT = "nodes.admin.decision"

_FACT_ROWS = (
    *(FACT_COLUMNS | {"drained": (*FACT_COLUMNS["drained"], "drain_deadline")}).values(),
    ("file_port_failed_at", "file_port_error"),
)
"""Facts of a node on its page, one row each. A row is shown while its first column has a value."""
_IDENTITY_FIELDS = (
    *("identity", "fingerprint", "bound_at", "rotation_requested_at", "source_address", "instance"),
    *("joined_with", "joined_note", "joined_by"),
)
_MACHINE_FIELDS = (
    *("node_type", "address", "http_address", "worker_version", "capability", "system", "hardware", "gpus"),
    *("total_vram", "available_vram", "reserved_vram", "total_ram", "available_ram"),
    *("total_disk", "available_disk", "inventory_at", "inventory_error"),
)
_RECORD_FIELDS = ("id", "created_at", "revision")
_OVERRIDE_FIELDS = ("override_cap", "cap", "override_budget", "budget", "quota", "seen_revision")
_OVERRIDE_COLUMNS = (
    ("max_replicas_per_model", "max_replicas_per_model_manually_set"),
    ("vram_budget", "vram_budget_bytes", "vram_budget_manually_set"),
)
_OVERRIDES_HELP = (
    "Overrides take precedence over the worker's values. Clear the checkbox to reset: the worker's own value"
    " applies again from its next registration."
)


def _last_change(node_id: UUID) -> str:
    """Return kind, actor and time of the node's last event, not counting claims of other machines."""
    events = NodeEvent.objects.filter(node_id=node_id).exclude(kind=NodeEvent.Kind.CONFLICT)
    event = events.order_by("-id").first()
    if event is None:
        return "the node was changed in the meantime"
    reason = f" ({event.cause})" if event.cause else ""
    kind = event.get_kind_display().lower()
    return f"changed in the meantime: {kind} by {event.actor} at {event.at:%Y-%m-%d %H:%M:%S} UTC{reason}"


class NodeForm(NodeModelForm):
    """The overrides of a node, and the revision of the node that the page shows."""

    override_cap = forms.BooleanField(required=False, label="Override maximum replicas")
    cap = forms.IntegerField(
        required=False, min_value=1, max_value=overrides.MAX_REPLICA_CAP, label="Maximum replicas per model"
    )
    override_budget = forms.BooleanField(required=False, label="Override VRAM budget")
    budget = forms.CharField(
        required=False,
        max_length=overrides.MAX_BUDGET_LENGTH,
        label="VRAM budget",
        help_text="For example 80%, 20GiB or a number of bytes. Leave empty for unlimited.",
    )
    quota = forms.CharField(
        required=False,
        max_length=overrides.MAX_BUDGET_LENGTH,
        label="Disk quota for models",
        help_text="For example 200GB, 80% of the disk or a number of bytes. Leave empty for none.",
    )
    seen_revision = forms.IntegerField(required=False, widget=forms.HiddenInput)

    class Meta:
        model = BackendNode
        fields = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        node = self.instance
        self.initial.update(
            override_cap=node.max_replicas_per_model_manually_set,
            cap=node.max_replicas_per_model,
            override_budget=node.vram_budget_manually_set,
            budget=node.vram_budget,
            quota=node.disk_quota,
            seen_revision=node.revision,
        )

    def clean(self) -> dict[str, Any]:
        """Lock the node until the transaction ends. Refuse the edit if the node has changed since."""
        values = super().clean() or self.cleaned_data
        revision = values.get("seen_revision")
        try:
            lock_node(self.instance.pk, -1 if revision is None else revision)
        except errors.NotFound:
            raise ValidationError("The node was removed in the meantime.") from None
        except errors.Conflict:
            raise ValidationError(
                format_html(
                    'Nothing was saved because this page is out of date: {}. <a href="">Reload</a>.',
                    _last_change(self.instance.pk),
                ),
                code="outdated",
            ) from None
        self._check_cap(values)
        self._check_budget(values)
        self._check_quota(values)
        return values

    def _check_cap(self, values: dict[str, Any]) -> None:
        if "cap" not in values:
            return
        if values["override_cap"]:
            if values["cap"] is None:
                self.add_error("cap", "Enter a number from 1, or clear the checkbox.")
        elif values["cap"] not in (None, self.instance.max_replicas_per_model):
            self.add_error("cap", "Select the checkbox above to set this value.")

    def _check_budget(self, values: dict[str, Any]) -> None:
        if "budget" not in values:
            return
        if not values["override_budget"]:
            if values["budget"] not in ("", self.instance.vram_budget):
                self.add_error("budget", "Select the checkbox above to set this value.")
            return
        try:
            resources.budget_ceiling(values["budget"], self.instance.total_vram)
        except ValueError as error:
            self.add_error("budget", f"{error}.".capitalize())

    def _check_quota(self, values: dict[str, Any]) -> None:
        try:
            resources.parse_disk_quota(values.get("quota", ""))
        except ValueError as error:
            self.add_error("quota", f"{error}.".capitalize())

    def write_overrides(self, actor: Actor, now: datetime) -> None:
        """Set or reset the overrides that the form changes."""
        values, node_id = self.cleaned_data, self.instance.pk
        if "override_cap" in self.changed_data or (values["override_cap"] and "cap" in self.changed_data):
            if values["override_cap"]:
                overrides.set_replica_cap(node_id, values["cap"], actor=actor, now=now)
            else:
                overrides.reset_replica_cap(node_id, actor=actor, now=now)
        if "override_budget" in self.changed_data or (
            values["override_budget"] and "budget" in self.changed_data
        ):
            if values["override_budget"]:
                overrides.set_vram_budget(node_id, values["budget"], actor=actor, now=now)
            else:
                overrides.reset_vram_budget(node_id, actor=actor, now=now)
        if "quota" in self.changed_data:
            overrides.set_disk_quota(node_id, values["quota"], actor=actor, now=now)


class DecisionForm(forms.Form):
    """The reason for an approval or a rejection."""

    reason = forms.CharField(
        required=False,
        max_length=actions.MAX_REASON_LENGTH,
        help_text="Shown on the node's page and in its timeline.",
    )

    def __init__(self, data: Any, *, needs_reason: bool) -> None:
        super().__init__(data)
        self.fields["reason"].required = needs_reason

    def clean_reason(self) -> str:
        """Refuse invisible characters."""
        reason = str(self.cleaned_data["reason"])
        try:
            names.check_text(reason, "The reason")
        except errors.InvalidInput as refusal:
            raise ValidationError(refusal.message) from None
        return reason


def _decide_on_node(
    action: Action, node_id: UUID, revision: int, *, actor: Actor, reason: str
) -> tuple[str, str]:
    """Run the action if the node still has this revision.

    Return the node's name and its new API token, "" without one. Raises NotFound, Conflict or InvalidInput.
    """
    with transaction.atomic():
        node = lock_node(node_id, revision)
        result = bulk.perform(action.name, node_id, actor, clock.now(), {"reason": reason})
    return node.name, result.api_token if isinstance(result, lifecycle.Approval) else ""


class LabelInline(ObservedInline):
    """The labels of a node; the pages and REST edit them."""

    model = NodeLabel
    fields = readonly_fields = ("key", "value", "source")
    ordering = ("key",)
    verbose_name_plural = "labels"

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True for users who may view the node."""
        return request.user.has_perm("nodes.view_backendnode") or request.user.has_perm(
            "nodes.change_backendnode"
        )


class VendorFilter(admin.AllValuesFieldListFilter):
    """Filter by GPU vendor, with a readable choice for nodes without a GPU."""

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        """Return Django's choices, with a text for the empty vendor."""
        for choice in super().choices(changelist):
            yield {**choice, "display": choice["display"] or "(none)"}


@admin.register(BackendNode)
class BackendNodeAdmin(ModelAdmin):
    """Admin of nodes; workers add them by their registration."""

    form = NodeForm
    inlines = (LabelInline,)
    actions = ("approve", "reject")
    change_form_template = "admin/nodes/node.html"
    list_display = ("name", "node_type", "state", "identity", "address", "last_heartbeat", "approved_by")
    list_filter = (
        *("status", "node_type", ("gpu_vendor", VendorFilter), "weak_identity"),
        ("approved_at", admin.EmptyFieldListFilter),
        ("rejected_at", admin.EmptyFieldListFilter),
        ("revoked_at", admin.EmptyFieldListFilter),
    )
    search_fields = ("name", "address", "label_set__key", "label_set__value")
    search_help_text = "Name, address or label"
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: the registration of its worker adds a node."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: the pages and REST remove nodes, together with their replicas."""
        return False

    def get_fieldsets(self, request: HttpRequest, obj: BackendNode | None = None) -> Any:
        """Return the columns by topic. A user who may only view sees the overrides read-only."""
        overridden = _OVERRIDE_FIELDS if self.has_change_permission(request, obj) else _OVERRIDE_COLUMNS
        facts = [columns for columns in _FACT_ROWS if obj is None or getattr(obj, columns[0])]
        return (
            ("State", {"fields": ("state", "last_heartbeat", *facts)}),
            ("Overrides", {"fields": overridden, "description": _OVERRIDES_HELP}),
            ("Identity", {"fields": _IDENTITY_FIELDS}),
            ("Machine", {"fields": _MACHINE_FIELDS}),
            ("Record", {"fields": _RECORD_FIELDS, "classes": ("collapse",)}),
        )

    def get_readonly_fields(self, request: HttpRequest, obj: BackendNode | None = None) -> list[str]:
        """Return everything that is not an override."""
        lines = (*_FACT_ROWS, *_OVERRIDE_COLUMNS, _IDENTITY_FIELDS, _MACHINE_FIELDS, _RECORD_FIELDS)
        return ["state", "last_heartbeat", *(column for columns in lines for column in columns)]

    @admin.display(description="status", ordering="status")
    def state(self, node: BackendNode) -> SafeString:
        """Return the status and its reason."""
        reasons = {
            "pending": node.reject_reason or node.revoke_reason,
            "offline": node.offline_reason,
            "draining": node.drain_reason,
            "unhealthy": node.unhealthy_reason,
        }
        return format_html(
            '<span class="node-badge node-badge-{}">{}</span><span class="node-because">{}</span>',
            node.status,
            node.status,
            reasons.get(node.status, ""),
        )

    @admin.display(description="identity", ordering="weak_identity")
    def identity(self, node: BackendNode) -> str:
        """Return the node's fingerprint in groups, or the other way in which the node proves its identity."""
        if node.weak_identity:
            return "weak: the shared token only"
        return group_characters(node.fingerprint) or "none: the secret was revoked"

    @admin.display(description="hardware")
    def hardware(self, node: BackendNode) -> str:
        """Return the GPU and the memory in one line."""
        gpu = " ".join(filter(None, (node.gpu_vendor, node.gpu_compute_capability))) or "no GPU"
        vram, ram = filesizeformat(node.total_vram), filesizeformat(node.total_ram)
        return f"{gpu}, VRAM {vram}, RAM {ram}, disk {filesizeformat(node.total_disk)}"

    @admin.action(description="Approve selected nodes…", permissions=["change"])
    def approve(self, request: HttpRequest, queryset: QuerySet[BackendNode]) -> HttpResponse | None:
        """Show the confirmation, then approve the nodes."""
        return self._decide(request, queryset, actions.APPROVE)

    @admin.action(description="Reject selected nodes…", permissions=["change"])
    def reject(self, request: HttpRequest, queryset: QuerySet[BackendNode]) -> HttpResponse | None:
        """Show the confirmation with its field for the reason, then reject the nodes."""
        return self._decide(request, queryset, actions.REJECT)

    def _decide(
        self, request: HttpRequest, queryset: QuerySet[BackendNode], action: Action
    ) -> HttpResponse | None:
        nodes = list(queryset.order_by("name")[: MAX_SELECTED_NODES + 1])
        if len(nodes) > MAX_SELECTED_NODES:
            self.message_user(request, f"Select at most {MAX_SELECTED_NODES} rows.", messages.ERROR)
            return None
        data = request.POST if "revisions" in request.POST else None
        form = DecisionForm(data, needs_reason=action.reason == "required")
        if not form.is_valid():
            return self._confirmation(request, nodes, action, form)
        try:
            revisions = signing.loads(request.POST["revisions"], salt=REVISIONS_SALT)
        except signing.BadSignature:
            raise BadRequest("revisions: not what the page carried") from None
        shows_token = self._run(request, action, revisions, form.cleaned_data["reason"])
        return self.render_messages(request, action.title) if shows_token else None

    def _run(self, request: HttpRequest, action: Action, revisions: Mapping[str, int], reason: str) -> bool:
        """Run the action on each node in a transaction of its own; report the results and refusals.

        Return True if a result has an API token.
        """
        actor = of_principal(principals.of_user(request.user))
        refused, shows_token = 0, False
        for node_id, revision in revisions.items():
            try:
                name, token = _decide_on_node(action, UUID(node_id), revision, actor=actor, reason=reason)
            except errors.ClusterError as refusal:
                refused += 1
                if refused <= MAX_REFUSALS_SHOWN:
                    outdated = refusal.field == "revision"
                    text = _last_change(UUID(node_id)) if outdated else refusal.message
                    node = BackendNode.objects.filter(pk=node_id).first() or node_id
                    self.message_user(request, f"Node {node}: {text}. Nothing was changed.", messages.ERROR)
            else:
                shows_token = shows_token or token != ""
                note = f" (API token of the agent, shown only once: {token})" if token else ""
                self.message_user(request, f"Node {name}{note}: {action.done}.", messages.SUCCESS)
        if refused > MAX_REFUSALS_SHOWN:
            self.message_user(request, f"{refused - MAX_REFUSALS_SHOWN} more were skipped.", messages.ERROR)
        return shows_token

    def _confirmation(
        self, request: HttpRequest, nodes: list[BackendNode], action: Action, form: DecisionForm
    ) -> TemplateResponse:
        """Return the confirmation page, with each node's identity and the reasons why nodes are skipped."""
        lines = [
            (node, actions.refusal(action, node), self.identity(node), self.hardware(node)) for node in nodes
        ]
        possible = [node for node, refusal, *_ in lines if not refusal]
        context = {
            **self.admin_site.each_context(request),
            "title": f"Confirm: {action.title}",
            "opts": self.opts,
            "action": action,
            "lines": lines,
            "possible": possible,
            "revisions": signing.dumps(
                {str(node.pk): node.revision for node in possible}, salt=REVISIONS_SALT, compress=True
            ),
            "form": form,
            "checkbox": ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/nodes/confirm.html", context)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Add the actions that apply to the node, for users who may run them."""
        node = context["original"]
        may_decide = self.has_change_permission(request, node)
        context["decisions"] = [
            action
            for action in (actions.APPROVE, actions.REJECT)
            if may_decide and not actions.refusal(action, node)
        ]
        return super().render_change_form(request, context, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: BackendNode, form: Any, change: bool) -> None:
        """Save the overrides through their service functions, not through the model."""
        form.write_overrides(of_principal(principals.of_user(request.user)), clock.now())


@admin.register(NodeLabel)
class NodeLabelAdmin(Observed):
    """Admin of the labels of all nodes, read-only."""

    list_display = ("node", "key", "value", "source")
    list_filter = ("source",)
    search_fields = ("key", "value", "node__name")
