"""Filters of the node and event lists: by choice, and by a text that is typed in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from nodes.models import BackendNode, NodeConflict, NodeLabel, NodeStatus, NodeType

if TYPE_CHECKING:  # generic for the type checker only
    Admin = ModelAdmin[Any]
else:
    Admin = ModelAdmin

Lookups = list[tuple[str, str]]


class Choice(SimpleListFilter):
    """One of a few values, each with the condition that it stands for."""

    conditions: dict[str, tuple[str, Q]]
    """Value in the address, its name on the page, and the rows it keeps."""

    def lookups(self, request: HttpRequest, model_admin: Admin) -> Lookups:
        """The choices."""
        return [(value, name) for value, (name, _) in self.conditions.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the chosen value; all of them if it is none of ours."""
        _, condition = self.conditions.get(self.value() or "", ("", Q()))
        return queryset.filter(condition)


class Typed(SimpleListFilter):
    """A text that is typed in; the other filters stay."""

    template = "admin/nodes/text_filter.html"
    hint = ""

    def lookups(self, request: HttpRequest, model_admin: Admin) -> Lookups:
        """Nothing to choose from; not empty, or the filter would not be shown."""
        return [("", "")]

    def get_facet_counts(self, pk_attname: str, filtered_qs: QuerySet[Any]) -> dict[str, Any]:
        """There are no values to count."""
        return {}

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        """What the template needs: the text, and the rest of the address as hidden fields."""
        kept = {name: value for name, value in changelist.params.items() if name != self.parameter_name}
        yield {
            "name": self.parameter_name,
            "value": self.value() or "",
            "hint": self.hint,
            "kept": kept,
            "without": changelist.get_query_string(remove=[str(self.parameter_name)]),
        }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows that the text chooses; PostgreSQL has no text with a NUL, so it chooses none."""
        text = (self.value() or "").strip()
        if "\0" in text:
            return queryset.none()
        return self.chosen(queryset, text) if text else queryset

    def chosen(self, queryset: QuerySet[Any], text: str) -> QuerySet[Any]:
        """The rows that `text`, not empty, chooses."""
        raise NotImplementedError


class StatusFilter(Choice):
    """By status."""

    title, parameter_name = "status", "status"
    conditions = {status.value: (status.value, Q(status=status.value)) for status in NodeStatus}


class TypeFilter(Choice):
    """By type."""

    title, parameter_name = "type", "type"
    conditions = {kind.value: (kind.value, Q(node_type=kind.value)) for kind in NodeType}


class IdentityFilter(Choice):
    """By how a node proves who it is."""

    title, parameter_name = "identity", "identity"
    conditions = {
        "strong": ("strong: a secret of its own", ~Q(fingerprint="")),
        "weak": ("weak: the shared token", Q(weak_identity=True)),
        "none": ("none: secret revoked", Q(fingerprint="", weak_identity=False)),
    }


class ConflictFilter(Choice):
    """By open identity conflicts."""

    title, parameter_name = "identity conflict", "conflict"
    conditions = {"open": ("open", Q(open_conflicts__gt=0)), "none": ("none open", Q(open_conflicts=0))}


class DecisionFilter(Choice):
    """By what an administrator decided about its approval."""

    title, parameter_name = "approval", "decision"
    conditions = {
        "waiting": (
            "awaiting decision",
            Q(approved_at__isnull=True, rejected_at__isnull=True, revoked_at__isnull=True),
        ),
        "rejected": ("rejected", Q(rejected_at__isnull=False)),
        "revoked": ("revoked", Q(revoked_at__isnull=False)),
    }


class VendorFilter(SimpleListFilter):
    """By GPU vendor, of those that there are."""

    title, parameter_name = "GPU vendor", "vendor"
    _none = "(none)"

    def lookups(self, request: HttpRequest, model_admin: Admin) -> Lookups:
        """The vendors of all nodes, in one query."""
        vendors = BackendNode.objects.order_by("gpu_vendor").values_list("gpu_vendor", flat=True).distinct()
        return [(vendor or self._none, vendor or self._none) for vendor in vendors]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Nodes with such a GPU."""
        vendor = self.value()
        if vendor is None:
            return queryset
        if "\0" in vendor:
            return queryset.none()
        return queryset.filter(gpu_vendor="" if vendor == self._none else vendor)


class LabelFilter(Typed):
    """By label: `key=value`, or `key` alone for any value; several with commas."""

    title, parameter_name, hint = "label", "label", "key=value"

    def chosen(self, queryset: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Nodes with all of the labels."""
        for wanted in text.split(","):
            key, separator, value = wanted.strip().partition("=")
            labels = NodeLabel.objects.filter(key=key.strip())
            if separator:
                labels = labels.filter(value=value.strip())
            queryset = queryset.filter(pk__in=labels.values("node_id"))
        return queryset


class NodeFilter(Typed):
    """By the name or the id of a node, existing or removed."""

    title, parameter_name, hint = "node", "node", "name or ID"

    def chosen(self, queryset: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Events of that node."""
        return queryset.filter(Q(node_name=text) | Q(node_id__in=_ids(text)))


class ActorFilter(Typed):
    """By who did it."""

    title, parameter_name, hint = "actor", "by", "user name, worker, …"

    def chosen(self, queryset: QuerySet[Any], text: str) -> QuerySet[Any]:
        """What that actor did."""
        return queryset.filter(actor=text)


class ConflictStateFilter(Choice):
    """By an administrator's decision."""

    title, parameter_name = "state", "state"
    conditions = {state.value: (state.value, Q(state=state.value)) for state in NodeConflict.State}


def _ids(text: str) -> list[UUID]:
    try:
        return [UUID(text)]
    except ValueError:
        return []
