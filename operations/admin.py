"""Django's admin for schedules, which can be paused; operations and controllers are read-only."""

from typing import Any, ClassVar

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django_q.admin import ScheduleAdmin, resubmit_task
from django_q.models import Schedule

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit import clock
from localai_cluster.web.admin import ModelAdmin, Observed, ObservedInline
from operations.models import ControllerBeat, Operation, OperationTarget, Sequence

# Otherwise the library uses the method's name as the column's title.
setattr(ScheduleAdmin.get_last_run, "short_description", "last run")  # noqa: B010 - as Django reads it
setattr(resubmit_task, "allowed_permissions", ("change",))  # noqa: B010 - as Django reads it
admin.site.unregister(Schedule)


def _require_next_time(cron: str) -> None:
    """Raise ValidationError for a cron expression without a next time: no schedule would run any more.

    django-q2 calculates the next times of all due schedules in one transaction.
    """
    schedule: Any = Schedule(schedule_type=Schedule.CRON, cron=cron)
    try:
        schedule.calculate_next_run()
    except ValueError as error:
        raise ValidationError(f"This expression has no next time: {error}") from None


@admin.register(Schedule)
class PausableScheduleAdmin(ModelAdmin, ScheduleAdmin):
    """Admin of schedules. The library represents a paused schedule as "0 repeats".

    Only their times can be edited: whoever may choose the function or its arguments runs any code on the
    server.
    """

    fields = ("name", "func", "cron", "next_run")
    readonly_fields: ClassVar[Any] = ("name", "func")

    list_display: Any = ("name", "cron", "running", "next_run", "get_last_run", "get_success")
    list_display_links: Any = ("name",)
    list_filter: ClassVar[Any] = ("next_run",)
    actions = ("pause", "resume")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: only the code declares schedules."""
        return False

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Return the form field of a column; a schedule needs a cron expression that has a next time."""
        if db_field.name == "cron":
            kwargs |= {"required": True, "validators": [_require_next_time]}
        return super().formfield_for_dbfield(db_field, request, **kwargs)

    @admin.display(boolean=True, description="running")
    def running(self, row: Schedule) -> bool:
        """Return True unless the schedule is paused."""
        return bool(row.repeats)

    @admin.action(description="Pause the selected schedules", permissions=["change"])
    def pause(self, request: HttpRequest, queryset: "QuerySet[Schedule]") -> None:
        """Pause the schedules until they are resumed."""
        self.message_user(
            request, f"Paused: {_change_schedules('paused', queryset.exclude(repeats=0), repeats=0)}"
        )

    @admin.action(description="Resume the selected schedules", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: "QuerySet[Schedule]") -> None:
        """Resume the schedules: each one runs now, and then at its planned times."""
        rows = queryset.filter(repeats=0)
        self.message_user(
            request, f"Resumed: {_change_schedules('resumed', rows, repeats=-1, next_run=clock.now())}"
        )


def _change_schedules(action: str, rows: "QuerySet[Schedule]", **columns: Any) -> int:
    """Change the rows and write an audit entry; return the number of rows."""
    with transaction.atomic():
        schedules = list(rows.select_for_update(of=("self",)).order_by("pk"))
        Schedule.objects.filter(pk__in=[row.pk for row in schedules]).update(**columns)
        audit.record(
            *(Change(f"schedule.{action}", f"schedule {row.name}", str(row.pk)) for row in schedules)
        )
    return len(schedules)


class TargetInline(ObservedInline):
    """The targets of an operation."""

    model = OperationTarget
    fields = readonly_fields = (
        *("node_name", "status", "percentage", "phase", "attempts", "wave", "reason", "error"),
        *("next_check_at", "started_at", "finished_at"),
    )


@admin.register(Operation)
class OperationAdmin(Observed):
    """Admin of operations, newest first; read-only."""

    list_display = (
        *("kind", "element", "node_name", "status", "progress", "message", "actor", "client_address"),
        "created_at",
    )
    list_filter = ("status", "kind")
    search_fields = ("element", "node_name", "request_id", "key")
    readonly_fields = ("page",)
    inlines = (TargetInline,)

    @admin.display(description="page")
    def page(self, operation: Operation) -> SafeString:
        """Return a link to the operation's live page."""
        return format_html('<a href="/app/operations/{}">Open the live page</a>', operation.pk)


@admin.register(OperationTarget)
class OperationTargetAdmin(Observed):
    """Admin of targets: the progress of all operations on each node; read-only."""

    list_display = ("operation", "node_name", "status", "percentage", "phase", "error")
    list_filter = ("status",)
    list_select_related = ("operation",)


@admin.register(Sequence)
class SequenceAdmin(Observed):
    """Admin of the counter that numbers changes of operations; read-only."""

    list_display = ("id", "value")


@admin.register(ControllerBeat)
class ControllerBeatAdmin(Observed):
    """Admin of the running controllers; read-only."""

    list_display = ("owner", "version", "started_at", "seen_at", "bus_connected")
