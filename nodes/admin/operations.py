"""Operations and intents: read-only rows; cancel, retry and dismiss go through the services of the API."""

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from localai_cluster.kit import clock, errors
from localai_cluster.web.admin import TabularInline
from nodes.admin.deeds import Deed, DeedAdmin
from nodes.api import operation_verbs
from nodes.backends.backend_requests import Asked
from nodes.models import PendingBackendOp
from operations import targets
from operations.ledger import admission
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus


class CommentForm(forms.Form):
    """Why a failure needs no more attention."""

    comment = forms.CharField(
        required=False, max_length=admission.LONGEST_COMMENT, help_text="Stays in the record."
    )


def _not_cancellable(operation: Operation) -> str:
    if operation.status not in ACTIVE:
        return f"{operation.status} already"
    return "" if operation.cancellable else "a deletion that has begun cannot be cancelled"


def _not_retryable(operation: Operation) -> str:
    if operation.status != Status.COMPLETED:
        return ""
    left = operation.targets.filter(status=TargetStatus.CANCELLED)
    return "" if operation.by_parts and left.exists() else "completed"


def _not_dismissable(operation: Operation) -> str:
    if operation.status != Status.FAILED:
        return f"{operation.status}: only a failure can be dismissed"
    return "dismissed already" if operation.dismissed_at else ""


def _dismiss(operation: Operation, by: Asked, comment: str) -> None:
    admission.dismiss(operation.id, actor=by.actor, now=clock.now(), comment=comment)


OPERATION_DEEDS = (
    Deed(
        "cancel",
        "Cancel operations",
        "cancelled",
        "Ends the operations for good. Workers that are at it are asked to stop.",
        _not_cancellable,
        lambda operation, by, _: operation_verbs.cancelled(operation, actor=by.actor),
        grave=True,
    ),
    Deed(
        "retry",
        "Retry operations",
        "tried again",
        "Asks again for what did not succeed, with the same request. What still waits is tried at once.",
        _not_retryable,
        lambda operation, by, _: operation_verbs.again(operation, [], by),
    ),
    Deed(
        "dismiss",
        "Dismiss failures",
        "dismissed",
        "Takes failures out of the inbox of all users. The record stays.",
        _not_dismissable,
        _dismiss,
        CommentForm,
    ),
)


def _parts_of(intent: PendingBackendOp) -> list[OperationTarget]:
    """The parts that it carries out. Raises Conflict where no operation asks for it any more."""
    found = OperationTarget.objects.filter(intent_id=intent.id, operation__status__in=ACTIVE)
    parts = list(found.exclude(status__in=targets.ENDED).select_related("operation").order_by("pk"))
    if not parts:
        raise errors.Conflict("no operation asks for it any more")
    return parts


def _cancel_intent(intent: PendingBackendOp, by: Asked, _: str) -> None:
    for part in _parts_of(intent):
        operation_verbs.part_cancelled(part.operation, part.node_id, actor=by.actor)


def _try_now(intent: PendingBackendOp, by: Asked, _: str) -> None:
    part = _parts_of(intent)[0]
    operation_verbs.again(part.operation, [part.node_id], by)


def _begun_or_called_off(intent: PendingBackendOp) -> str:
    if intent.cancelled_at is not None:
        return "cancelled already"
    return "a controller is at it" if intent.lease_until is not None else ""


INTENT_DEEDS = (
    Deed(
        "cancel",
        "Cancel on this node",
        "cancelled",
        "Ends the work on this node for every operation that asks for it. Other nodes go on.",
        lambda intent: "cancelled already" if intent.cancelled_at is not None else "",
        _cancel_intent,
        grave=True,
    ),
    Deed(
        "try_now",
        "Try now",
        "tried at once",
        "Ends the pause before the next attempt. A node that is not healthy is still waited for.",
        _begun_or_called_off,
        _try_now,
    ),
)


class TargetInline(TabularInline):
    """An operation's part on each node."""

    model = OperationTarget
    extra = 0
    can_delete = False
    fields = readonly_fields = (
        "node_name", "status", "percentage", "phase", "attempts", "wave", "reason", "error", "next_look_at",
        "started_at", "finished_at",
    )  # fmt: skip

    def has_add_permission(self, request: HttpRequest, obj: Operation | None = None) -> bool:
        """Targets come with the operation."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Operation | None = None) -> bool:
        """Progress is reported by workers."""
        return False


@admin.register(Operation)
class OperationAdmin(DeedAdmin):
    """The ledger, newest first."""

    deeds = OPERATION_DEEDS
    list_display = (
        "kind", "element", "node_name", "status", "progress", "message", "actor", "client_address",
        "created_at",
    )  # fmt: skip
    list_filter = ("status", "kind")
    search_fields = ("element", "node_name", "request_id", "key")
    readonly_fields = ("page",)
    inlines = (TargetInline,)

    @admin.display(description="page")
    def page(self, operation: Operation) -> SafeString:
        """Where it is live."""
        return format_html('<a href="/app/operations/{}">Open the live page</a>', operation.pk)


@admin.register(PendingBackendOp)
class PendingBackendOpAdmin(DeedAdmin):
    """Work on one node that is not done yet."""

    deeds = INTENT_DEEDS
    list_display = ("backend", "op", "node", "attempts", "next_retry_at", "last_error", "lease_owner")
    list_filter = ("op",)
    list_select_related = ("node",)
    search_fields = ("backend", "node__name")
    ordering = ("backend", "created_at", "pk")
