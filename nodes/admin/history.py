"""Node events, identity conflicts and revoked secrets; also the conflicts of a node's page.

Events and revoked secrets are read-only. A conflict is decided by a verb (`verbs.py`), never edited.
"""

import json
from dataclasses import dataclass
from datetime import datetime

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from localai_cluster.kit import clock
from localai_cluster.kit.nkeys import grouped
from localai_cluster.web.admin import Observed
from nodes.admin import filters, words
from nodes.admin.confirm import VerbAdmin
from nodes.admin.verbs import CONFLICT_VERBS, Verb
from nodes.admin.wide import Wide
from nodes.models import BackendNode, NodeConflict, NodeEvent, RevokedSecret

_SECRETS = (NodeConflict.Mismatch.SECRET, NodeConflict.Mismatch.WEAK)


@dataclass(frozen=True)
class ConflictPanel:
    """An open conflict on a node's page: the claim, and the possible answers."""

    conflict: NodeConflict
    claim: str
    first: SafeString | str
    last: SafeString | str
    buttons: list[tuple[Verb, str]]
    hint: str
    """Why it cannot be accepted, "" if it can."""


def open_conflicts(node: BackendNode, *, may_decide: bool) -> list[ConflictPanel]:
    """The open claims, newest first."""
    conflicts = NodeConflict.objects.filter(node=node, state=NodeConflict.State.OPEN)
    now = clock.now()
    return [_panel(conflict, may_decide, now) for conflict in conflicts]


def _panel(conflict: NodeConflict, may_decide: bool, now: datetime) -> ConflictPanel:
    refusals = {verb.name: verb.refusal(conflict) for verb in CONFLICT_VERBS}
    buttons = [
        (verb, reverse(f"admin:nodes_nodeconflict_{verb.name}", args=[conflict.pk]))
        for verb in CONFLICT_VERBS
        if may_decide and not refusals[verb.name]
    ]
    first, last = (words.moment(at, now) for at in (conflict.first_at, conflict.last_at))
    return ConflictPanel(conflict, _claim(conflict), first, last, buttons, refusals["accept"])


def _claim(conflict: NodeConflict) -> str:
    """What tells this claimant from others, readable; "" if addresses and name say it."""
    if conflict.kind in _SECRETS:
        return f"fingerprint {grouped(conflict.claim)}"
    return f"process {conflict.claim}" if conflict.kind == NodeConflict.Mismatch.INSTANCE else ""


@admin.register(NodeEvent)
class NodeEventAdmin(Wide, Observed):
    """The timeline of all nodes, of removed ones too."""

    list_display = ("when", "node_name", "kind", "actor", "cause", "status", "count", "told")
    list_display_links = ("when",)
    list_filter = ("kind", filters.NodeFilter, filters.ActorFilter, "actor_kind")
    search_fields = ("node_name", "cause", "request_id")
    search_help_text = "Node name, cause or request ID"
    date_hierarchy = "at"
    show_full_result_count = False
    ordering = ("-id",)
    fields = (
        "at",
        "node",
        "kind",
        ("actor", "actor_kind"),
        "cause",
        "status",
        "count",
        "last_at",
        "request_id",
        "whole",
    )
    readonly_fields = ("node", "status", "whole")

    @admin.display(description="when", ordering="id")
    def when(self, event: NodeEvent) -> str:
        """To the second; a node's events often come in bursts."""
        return words.plain_time(event.at)

    @admin.display(description="status")
    def status(self, event: NodeEvent) -> str:
        """Before and after."""
        if event.status_before == event.status_after:
            return event.status_after or words.NOTHING
        return f"{event.status_before} → {event.status_after}"

    @admin.display(description="detail")
    def told(self, event: NodeEvent) -> str:
        """What else is known, in a line."""
        return words.detail(event.detail)

    @admin.display(description="detail")
    def whole(self, event: NodeEvent) -> SafeString:
        """What else is known, as it is stored."""
        return format_html("<pre>{}</pre>", json.dumps(event.detail, indent=2, ensure_ascii=False))

    @admin.display(description="node")
    def node(self, event: NodeEvent) -> SafeString:
        """Its name then, its id, and its other events."""
        url = reverse("admin:nodes_nodeevent_changelist") + f"?node={event.node_id}"
        return format_html(
            '{} <code>{}</code> <a href="{}">all events</a>', event.node_name, event.node_id, url
        )


@admin.register(NodeConflict)
class NodeConflictAdmin(Wide, Observed, VerbAdmin):
    """Claims to be a node that exists."""

    verbs = CONFLICT_VERBS
    node_path = "node_id"
    list_display = (
        "kind",
        "claimed",
        "standing",
        "source_address",
        "advertised_address",
        "node_source_address",
        "count",
        "seen",
        "decided_by",
    )
    list_filter = (filters.ConflictStateFilter, "kind")
    list_select_related = ("node",)
    search_fields = ("node__name", "source_address", "advertised_address", "claimed_name")
    show_full_result_count = False
    fields = (
        "node",
        "kind",
        "standing",
        "claim",
        "claimed_name",
        "source_address",
        "advertised_address",
        "node_source_address",
        "count",
        "first_at",
        "last_at",
        ("decided_at", "decided_by"),
    )
    readonly_fields = ("standing",)

    @admin.display(description="state", ordering="state")
    def standing(self, conflict: NodeConflict) -> SafeString:
        """Open, accepted or refused."""
        return words.badge("conflict" if conflict.state == "open" else "quiet", conflict.state)

    @admin.display(description="node", ordering="node__name")
    def claimed(self, conflict: NodeConflict) -> SafeString:
        """The node that is claimed; its page shows both sides."""
        url = reverse("admin:nodes_backendnode_change", args=[conflict.node_id])
        return format_html('<a href="{}">{}</a>', url, conflict.node.name)

    @admin.display(description="last seen", ordering="last_at")
    def seen(self, conflict: NodeConflict) -> str:
        """When the claimant was refused last."""
        return words.plain_time(conflict.last_at)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """The permission to change conflicts is the one to decide them; editing one is impossible."""
        return request.user.has_perm("nodes.change_nodeconflict")

    def get_queryset(self, request: HttpRequest) -> QuerySet[NodeConflict]:
        """With their nodes."""
        return NodeConflict.objects.select_related("node").order_by("-last_at")

    def node_of(self, row: NodeConflict) -> BackendNode:
        """The node that is claimed."""
        return row.node


@admin.register(RevokedSecret)
class RevokedSecretAdmin(Observed):
    """Secrets that are never accepted again."""

    list_display = ("fingerprint", "node_name", "revoked_at", "revoked_by")
    search_fields = ("fingerprint", "node_name", "revoked_by")
    date_hierarchy = "revoked_at"
    show_full_result_count = False
    ordering = ("-revoked_at",)
