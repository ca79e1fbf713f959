"""Operations in Django's admin: read-only."""

from django.contrib import admin
from django.http import HttpRequest
from django_q.admin import ScheduleAdmin

from localai_cluster.web.admin import Observed, TabularInline
from operations.models import ControllerBeat, Operation, OperationTarget, Sequence

# The library shows the method's name as the column's.
setattr(ScheduleAdmin.get_last_run, "short_description", "last run")  # noqa: B010 - as Django reads it


class TargetInline(TabularInline):
    """An operation's progress per node."""

    model = OperationTarget
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Operation | None = None) -> bool:
        """Targets come with the operation."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Operation | None = None) -> bool:
        """Progress is reported by workers."""
        return False


@admin.register(Operation)
class OperationAdmin(Observed):
    """The ledger, newest first."""

    list_display = ("kind", "element", "node_name", "status", "progress", "message", "actor", "created_at")
    list_filter = ("status", "kind")
    search_fields = ("element", "node_name", "request_id", "key")
    inlines = (TargetInline,)


@admin.register(OperationTarget)
class OperationTargetAdmin(Observed):
    """Progress per node over all operations."""

    list_display = ("operation", "node_name", "status", "percentage", "phase", "error")
    list_filter = ("status",)
    list_select_related = ("operation",)


@admin.register(Sequence)
class SequenceAdmin(Observed):
    """The sequence behind the numbers of changes."""

    list_display = ("id", "value")


@admin.register(ControllerBeat)
class ControllerBeatAdmin(Observed):
    """Running controllers."""

    list_display = ("owner", "seen_at", "bus_connected")
