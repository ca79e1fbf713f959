"""Schedules declared in code, stored as ordinary django-q2 rows: visible, editable and pausable in the admin.

`ensure` creates missing rows and repairs their functions; an operator's own timing or pause stays. The
controller calls `tick` every second, because django-q2's own loop polls only every 30 s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Min
from django_q.brokers import get_broker
from django_q.models import OrmQ, Schedule
from django_q.scheduler import scheduler

from localai_cluster.kit import clock
from localai_cluster.kit.locks import Lock, try_lock

SILENT_AFTER = 30.0
"""Seconds that a task may wait before the processes that run tasks count as dead."""
BACKLOG = 20
"""Waiting tasks at which the ticker enqueues no more."""


@dataclass(frozen=True)
class Recurring:
    """A recurring task; `cron` has six fields, the last one seconds."""

    name: str
    function: str
    cron: str


def ensure(recurring: Iterable[Recurring]) -> None:
    """Create the rows of all declared schedules; safe from several processes at once."""
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


def tick() -> None:
    """Enqueue every schedule that is due; several tickers never fire one twice (row locks).

    While no process takes tasks off the queue it adds none: a backlog of the same pass is useless.
    """
    due = Schedule.objects.exclude(repeats=0).filter(next_run__lt=clock.now())
    if due.exists() and OrmQ.objects.count() < BACKLOG:
        scheduler(broker=get_broker())


def waiting_since(*, now: datetime) -> datetime | None:
    """Return the time since which the oldest unclaimed task waits; None if there is none. One query."""
    # A claimed task has a `lock` in the future, after which another process may claim it.
    oldest: datetime | None = OrmQ.objects.filter(lock__lte=now).aggregate(oldest=Min("lock"))["oldest"]
    return oldest
