"""What the list and the page of a node show: computed from its row, read-only."""

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from localai_cluster.kit import clock
from nodes.admin import words
from nodes.admin.verbs import remains
from nodes.models import BackendNode
from nodes.registry import versions

Shown = SafeString | str


class NodeDisplay:
    """Display methods for a model admin of nodes of a `with_counts` queryset with `open_conflicts`."""

    @admin.display(description="type", ordering="node_type")
    def kind(self, node: BackendNode) -> str:
        """Backend or agent."""
        return node.node_type

    @admin.display(description="status", ordering="status")
    def state(self, node: BackendNode) -> Shown:
        """The status and its reason."""
        return format_html("{}{}", words.badge(node.status, node.status), _small(_because(node)))

    @admin.display(description="identity", ordering="weak_identity")
    def proof(self, node: Any) -> Shown:
        """How the node proves its identity, and open conflicts about it."""
        kind = "strong" if node.fingerprint else "weak" if node.weak_identity else "none"
        parts = [words.badge(f"identity-{kind}", kind)]
        if node.rotation_requested_at:
            parts.append(words.badge("draining", "rotation requested"))
        if node.open_conflicts:
            parts.append(words.badge("conflict", words.count(node.open_conflicts, "open conflict")))
        return format_html_join(" ", "{}", ((part,) for part in parts))

    @admin.display(description="last heartbeat", ordering="last_heartbeat")
    def beat(self, node: BackendNode) -> Shown:
        """How long ago."""
        return words.age(node.last_heartbeat, clock.now())

    @admin.display(description="work")
    def work(self, node: Any) -> Shown:
        """What runs there; for a drain, what remains and until when."""
        text = remains(node)
        if node.drain_deadline is None:
            return text
        return format_html("{}; drain until {}", text, words.moment(node.drain_deadline, clock.now()))

    @admin.display(description="approved")
    def approval(self, node: BackendNode) -> Shown:
        """Since when, by whom, why."""
        return _fact(node.approved_at, node.approved_by, node.approval_reason)

    @admin.display(description="rejected")
    def rejection(self, node: BackendNode) -> Shown:
        """Since when, by whom, why."""
        return _fact(node.rejected_at, node.rejected_by, node.reject_reason)

    @admin.display(description="revoked")
    def revocation(self, node: BackendNode) -> Shown:
        """Since when, by whom, why."""
        return _fact(node.revoked_at, node.revoked_by, node.revoke_reason)

    @admin.display(description="drained")
    def drain(self, node: BackendNode) -> Shown:
        """Since when, by whom, why."""
        return _fact(node.drained_at, node.drained_by, node.drain_reason)

    @admin.display(description="offline")
    def absence(self, node: BackendNode) -> Shown:
        """Since when, by whom, why."""
        return _fact(node.offline_at, node.offline_by, node.offline_reason)

    @admin.display(description="unhealthy")
    def health(self, node: BackendNode) -> Shown:
        """Since when, by whom, why."""
        return _fact(node.unhealthy_at, node.unhealthy_by, node.unhealthy_reason)

    @admin.display(description="file port")
    def file_port(self, node: BackendNode) -> Shown:
        """Since when it does not answer, and why."""
        return _fact(node.file_port_failed_at, "a check", node.file_port_error)

    @admin.display(description="fingerprint")
    def secret(self, node: BackendNode) -> Shown:
        """SHA-256 of the worker's secret, to search for."""
        return format_html("<code>{}</code>", node.fingerprint) if node.fingerprint else words.NOTHING

    @admin.display(description="secret bound")
    def bound(self, node: BackendNode) -> Shown:
        """When a secret was bound first."""
        return words.moment(node.bound_at, clock.now())

    @admin.display(description="rotation requested")
    def rotation(self, node: BackendNode) -> Shown:
        """Since when."""
        return words.moment(node.rotation_requested_at, clock.now())

    @admin.display(description="joined with")
    def joined(self, node: BackendNode) -> Shown:
        """The join token that it registered with."""
        if node.joined_with is None:
            return words.NOTHING
        return f"join token “{node.joined_note or str(node.joined_with)[:8]}”, made by {node.joined_by}"

    @admin.display(description="worker version")
    def version(self, node: BackendNode) -> Shown:
        """What the worker said, and what is odd about it."""
        skew = versions.skew(node.node_type, node.worker_version, weak=node.weak_identity)
        shown = node.worker_version or words.NOTHING
        return format_html("{} {}", shown, words.badge("conflict", skew)) if skew else shown

    @admin.display(description="last heartbeat")
    def heard(self, node: BackendNode) -> Shown:
        """The last heartbeat."""
        return words.moment(node.last_heartbeat, clock.now())

    @admin.display(description="GPUs")
    def gpus_shown(self, node: BackendNode) -> Shown:
        """One by one, as the worker told them last."""
        lines = ((_gpu(one),) for one in node.gpus)
        return format_html_join("", "<div>{}</div>", lines) or words.NOTHING

    @admin.display(description="first seen")
    def first_seen(self, node: BackendNode) -> Shown:
        """When the record was made."""
        return words.moment(node.created_at, clock.now())

    @admin.display(description="maximum replicas per model")
    def cap_shown(self, node: BackendNode) -> Shown:
        """The cap and its source."""
        return f"{node.max_replicas_per_model}, {_decided(node.max_replicas_per_model_manually_set)}"

    @admin.display(description="VRAM budget")
    def budget_shown(self, node: BackendNode) -> Shown:
        """The budget, its bytes and its source."""
        limit = (
            f"{node.vram_budget} ({words.size(node.vram_budget_bytes)})" if node.vram_budget else "unlimited"
        )
        return f"{limit}, {_decided(node.vram_budget_manually_set)}"


def hardware(node: BackendNode) -> str:
    """The hardware that a worker reports, in a line."""
    gpu = " ".join(filter(None, (node.gpu_vendor, node.gpu_compute_capability))) or "no GPU"
    return f"{gpu}, VRAM {words.size(node.total_vram)}, RAM {words.size(node.total_ram)}, disk " + words.size(
        node.total_disk
    )


def _because(node: BackendNode) -> str:
    """The reason of the status."""
    if node.status == "pending":
        if node.rejected_at:
            return f"rejected: {node.reject_reason}" if node.reject_reason else "rejected"
        return "revoked" if node.revoked_at else ""
    reasons = {
        "offline": node.offline_reason,
        "draining": f"by {node.drained_by}" + (f": {node.drain_reason}" if node.drain_reason else ""),
        "unhealthy": node.unhealthy_reason,
    }
    return reasons.get(node.status, "")


def _gpu(one: dict[str, Any]) -> str:
    busy = "" if one["utilization"] is None else f", {one['utilization']} % busy"
    free, total = words.size(one["free_vram"]), words.size(one["total_vram"])
    return f"{one['index']}: {one['name'] or 'GPU'}, {free} of {total} free{busy}"


def _decided(manually: bool) -> str:
    return "set by an administrator" if manually else "worker default"


def _small(text: str) -> Shown:
    return format_html('<span class="node-because">{}</span>', text) if text else ""


def _fact(at: datetime | None, by: str, why: str) -> Shown:
    if at is None:
        return words.NOTHING
    reason = f": {why}" if why else ""
    return format_html("{} by {}{}", words.moment(at, clock.now()), by or "unknown", reason)
