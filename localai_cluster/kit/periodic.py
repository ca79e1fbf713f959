"""Schedules that code declares, stored as rows of django-q2.

The admin shows the rows, and an operator can edit or pause them. `ensure_schedules` creates missing rows and
corrects their functions; it keeps an operator's own timing or pause. The controller calls
`enqueue_due_schedules` every second, because django-q2's own loop polls only every 30 s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Min
from django_q.brokers import get_broker
from django_q.models import Failure, OrmQ, Schedule
from django_q.scheduler import scheduler

from localai_cluster.kit import clock
from localai_cluster.kit.transactions import Lock, try_lock

MAX_TASK_WAIT_SECONDS = 30.0
"""Seconds that a task may wait in the queue. A longer wait means that no process runs tasks."""
MAX_TRIGGER_DELAY = timedelta(seconds=30)
"""Delay of a schedule's trigger after which no controller seems to be running."""
MAX_BACKLOG = 20
"""Number of waiting tasks at which the ticker stops adding tasks."""
MAX_FAILURES = 1000
"""Maximum number of stored failed runs. django-q2 limits only the successful ones."""


@dataclass(frozen=True)
class RecurringTask:
    """The schedule of a task. `cron` has six fields; the last field is the second of the minute."""

    name: str
    function: str
    cron: str


def ensure_schedules(recurring: Iterable[RecurringTask]) -> None:
    """Create the missing rows of the declared schedules. Several processes may call it concurrently."""
    with try_lock(Lock.SCHEDULES) as mine:
        if not mine:
            return
        for entry in recurring:
            Schedule.objects.update_or_create(
                name=entry.name,
                defaults={"func": entry.function},
                create_defaults={
                    "func": entry.function,
                    "schedule_type": Schedule.CRON,
                    "cron": entry.cron,
                    "repeats": -1,
                },
            )


def enqueue_due_schedules() -> None:
    """Enqueue every due schedule. Row locks prevent several processes from enqueuing the same run.

    While no process takes tasks off the queue, add at most `MAX_BACKLOG`: many runs of one task are useless.
    """
    due = Schedule.objects.exclude(repeats=0).filter(next_run__lt=clock.now())
    if due.exists() and OrmQ.objects.count() < MAX_BACKLOG:
        scheduler(broker=get_broker())


def waiting_since(*, now: datetime) -> datetime | None:
    """Return the time since which the oldest unclaimed task waits; None without one. One query."""
    # A claimed task has a `lock` in the future, after which another process may claim it.
    oldest: datetime | None = OrmQ.objects.filter(lock__lte=now).aggregate(oldest=Min("lock"))["oldest"]
    return oldest


def prune_failures(*, before: datetime, limit: int) -> int:
    """Delete up to `limit` failed runs that ended before `before`, or exceed `MAX_FAILURES`.

    Return their number.
    """
    newest = Failure.objects.order_by("-stopped", "-pk").values_list("pk", flat=True)[:MAX_FAILURES]
    kept = Failure.objects.filter(pk__in=list(newest), stopped__gte=before).values_list("pk", flat=True)
    old = Failure.objects.exclude(pk__in=list(kept)).order_by("stopped", "pk").values_list("pk", flat=True)
    deleted, _ = Failure.objects.filter(pk__in=list(old[:limit])).delete()
    return deleted
