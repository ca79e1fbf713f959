"""What an admin may type in on a node's page: overrides and labels.

Nothing here saves a row: the form says what was asked for, and `nodes.py` hands that to the services. The
page carries the node's revision; the row is locked and compared before anything is believed, and the lock
holds until the change is written, so of two admins the second is told what the first has done.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.forms.models import BaseInlineFormSet
from django.http import HttpRequest
from django.utils.html import format_html

from localai_cluster.kit import errors, names
from localai_cluster.web.admin import TabularInline
from nodes.admin import seen
from nodes.models import BackendNode, NodeLabel
from nodes.registry import budget, services
from nodes.registry.labels import LONGEST_KEY, LONGEST_VALUE, MOST_LABELS
from nodes.registry.overrides import LARGEST_CAP, LONGEST_BUDGET

if TYPE_CHECKING:  # generic for the type checker only
    NodeModelForm = forms.ModelForm[BackendNode]
    LabelModelForm = forms.ModelForm[NodeLabel]
    LabelsOfNode = BaseInlineFormSet[NodeLabel, BackendNode, "LabelForm"]
else:
    NodeModelForm = LabelModelForm = forms.ModelForm
    LabelsOfNode = BaseInlineFormSet

_ORIGIN = {
    NodeLabel.Source.ADMIN: "administrator",
    NodeLabel.Source.WORKER: "worker",
    NodeLabel.Source.AUTO: "automatic",
}


class NodeForm(NodeModelForm):
    """Overrides of a node, and the revision on which they are decided."""

    override_cap = forms.BooleanField(required=False, label="Override maximum replicas")
    cap = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=LARGEST_CAP,
        label="Maximum replicas per model",
    )
    override_budget = forms.BooleanField(required=False, label="Override VRAM budget")
    budget = forms.CharField(
        required=False,
        max_length=LONGEST_BUDGET,
        label="VRAM budget",
        help_text="For example 80%, 20GiB or a number of bytes. Leave empty for unlimited.",
    )
    revision = forms.IntegerField(required=False, widget=forms.HiddenInput)
    seen = forms.IntegerField(required=False, widget=forms.HiddenInput)

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
            revision=node.revision,
            seen=getattr(node, "newest_event", 0),
        )

    def clean(self) -> dict[str, Any]:
        """Locks the node and refuses what was decided on another revision than the row's."""
        asked = super().clean() or self.cleaned_data
        revision = asked.get("revision")
        try:
            services.locked(self.instance.pk, -1 if revision is None else revision)
        except errors.NotFound:
            raise ValidationError("The node was removed in the meantime.") from None
        except errors.Conflict:
            told = seen.since(self.instance.pk, asked.get("seen") or 0)
            raise ValidationError(
                format_html(
                    'Nothing was saved because this page is out of date: {}. <a href="">Reload</a>.',
                    told,
                ),
                code="outdated",
            ) from None
        self._check_cap(asked)
        self._check_budget(asked)
        return asked

    def asks_for_cap(self) -> bool:
        """Whether to set or reset the replica cap."""
        asked = self.cleaned_data
        if asked["override_cap"] != self.instance.max_replicas_per_model_manually_set:
            return True
        return bool(asked["override_cap"] and asked["cap"] != self.instance.max_replicas_per_model)

    def asks_for_budget(self) -> bool:
        """Whether to set or reset the VRAM budget."""
        asked = self.cleaned_data
        if asked["override_budget"] != self.instance.vram_budget_manually_set:
            return True
        return bool(asked["override_budget"] and asked["budget"] != self.instance.vram_budget)

    def _check_cap(self, asked: dict[str, Any]) -> None:
        if "cap" not in asked:
            return
        if asked["override_cap"]:
            if asked["cap"] is None:
                self.add_error("cap", "Enter a number from 1, or clear the checkbox.")
        elif asked["cap"] not in (None, self.instance.max_replicas_per_model):
            self.add_error("cap", "Select the checkbox above to set this value.")

    def _check_budget(self, asked: dict[str, Any]) -> None:
        if "budget" not in asked:
            return
        if not asked["override_budget"]:
            if asked["budget"] not in ("", self.instance.vram_budget):
                self.add_error("budget", "Select the checkbox above to set this value.")
            return
        try:
            budget.ceiling(asked["budget"], self.instance.total_vram)
        except ValueError as error:
            self.add_error("budget", f"{error}.".capitalize())


class LabelForm(LabelModelForm):
    """One label. The registry's own are shown and cannot be changed."""

    # In a table the column's heading is no label of the field.
    key = forms.CharField(
        max_length=LONGEST_KEY, strip=False, widget=forms.TextInput(attrs={"aria-label": "Key"})
    )
    value = forms.CharField(
        max_length=LONGEST_VALUE,
        strip=False,
        required=False,
        widget=forms.TextInput(attrs={"aria-label": "Value"}),
    )

    class Meta:
        model = NodeLabel
        fields = ("key", "value")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_automatic():
            for field in self.fields.values():
                field.disabled = True

    def is_automatic(self) -> bool:
        """Whether the registry itself says this."""
        return self.instance.pk is not None and self.instance.source == NodeLabel.Source.AUTO

    def clean_key(self) -> str:
        """Only what a person can see."""
        return _visible(str(self.cleaned_data["key"]))

    def clean_value(self) -> str:
        """Only what a person can see."""
        return _visible(str(self.cleaned_data["value"]))

    def validate_unique(self) -> None:
        """The formset compares the keys with each other; a key may move from one row to another."""

    def validate_constraints(self) -> None:
        """As above."""


class LabelFormSet(LabelsOfNode):
    """All labels of a node. Answers what was asked for; saves nothing."""

    def add_fields(self, form: Any, index: int | None) -> None:
        """Automatic labels cannot be deleted."""
        super().add_fields(form, index)
        if "DELETE" in form.fields:
            form.fields["DELETE"].widget.attrs["aria-label"] = "Delete"
            form.fields["DELETE"].disabled = form.is_automatic()

    def clean(self) -> None:
        """What the service would refuse, said on the page instead."""
        super().clean()
        if any(self.errors):
            return
        try:
            services.check_labels(self.wanted())
        except errors.InvalidInput as refusal:
            raise ValidationError(refusal.message) from None
        if self.wanted() and len(self._kept()) > 2 * MOST_LABELS:
            raise ValidationError(f"A node can have at most {2 * MOST_LABELS} labels.")

    def wanted(self) -> dict[str, str]:
        """New and changed labels: they become the administrator's."""
        return {
            form.cleaned_data["key"]: form.cleaned_data["value"]
            for form in self._kept()
            if form.has_changed()
        }

    def dropped(self) -> set[str]:
        """Keys that are deleted or renamed away."""
        gone = {form.initial["key"] for form in self.initial_forms if form in self.deleted_forms}
        renamed = {
            form.initial["key"] for form in self._kept() if "key" in form.changed_data and form.initial
        }
        return (gone | renamed) - self.wanted().keys()

    def _kept(self) -> Sequence[Any]:
        return [
            form
            for form in self.forms
            if form not in self.deleted_forms and form.cleaned_data.get("key") is not None
        ]


class LabelInline(TabularInline):
    """A node's labels; one made or touched here is the admin's and survives the worker's registrations."""

    model = NodeLabel
    form = LabelForm
    formset = LabelFormSet  # type: ignore[assignment]  # the stubs want a formset of any form
    extra = 1
    max_num = 2 * MOST_LABELS
    fields = ("key", "value", "origin")
    readonly_fields = ("origin",)
    ordering = ("key",)
    verbose_name_plural = "labels"

    def get_formset(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> Any:
        """A request that claims more rows than a node can have is not built up row by row."""
        return super().get_formset(request, obj, absolute_max=2 * self.max_num, **kwargs)

    @admin.display(description="source")
    def origin(self, label: NodeLabel) -> str:
        """Where it comes from."""
        return _ORIGIN[NodeLabel.Source(label.source)] if label.pk else ""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """As for the node."""
        return request.user.has_perm("nodes.view_backendnode") or self.has_change_permission(request, obj)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """As for the node."""
        return request.user.has_perm("nodes.change_backendnode")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """As for the node."""
        return self.has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """As for the node."""
        return self.has_change_permission(request, obj)


def _visible(text: str) -> str:
    try:
        names.check_text(text, "This")
    except errors.InvalidInput as refusal:
        raise ValidationError(refusal.message + ".") from None
    return text
