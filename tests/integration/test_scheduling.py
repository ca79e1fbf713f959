"""Schedules declared in code: made once, ticked without a pile-up, an operator's pause kept."""

from datetime import timedelta

import pytest
from django_q.models import OrmQ, Schedule

from localai_cluster import clock, scheduling
from localai_cluster.scheduling import Recurring
from nodes.schedules import SCHEDULES
from operations.schedules import SCHEDULES as LEDGER_SCHEDULES

pytestmark = pytest.mark.django_db(transaction=True)

EVERY = [*SCHEDULES, *LEDGER_SCHEDULES]


def due() -> None:
    """Makes every schedule due."""
    Schedule.objects.update(next_run=clock.now() - timedelta(seconds=1))


def test_declared_schedules_are_rows_and_keep_an_operators_pause() -> None:
    """Declared in code, visible in the admin; what an operator changed there stays."""
    scheduling.ensure(EVERY)
    Schedule.objects.filter(name=EVERY[0].name).update(repeats=0, cron="0 0 * * *")
    scheduling.ensure(EVERY)
    assert set(Schedule.objects.values_list("name", "func")) == {(one.name, one.function) for one in EVERY}
    assert Schedule.objects.values_list("repeats", "cron").get(name=EVERY[0].name) == (0, "0 0 * * *")


def test_a_due_schedule_is_enqueued_once() -> None:
    """A tick enqueues what is due; the next one finds it rescheduled, here to the first of January."""
    scheduling.ensure([Recurring("rare", "nodes.tasks.liveness", "0 0 1 1 * 0")])
    due()
    scheduling.tick()
    scheduling.tick()
    assert OrmQ.objects.count() == 1


def test_every_due_schedule_is_enqueued() -> None:
    """One task each."""
    scheduling.ensure(EVERY)
    due()
    scheduling.tick()
    assert OrmQ.objects.count() == len(EVERY)


def test_nothing_piles_up_while_nobody_takes_tasks() -> None:
    """A task cluster that was away for an hour does not come back to a thousand identical passes."""
    scheduling.ensure([Recurring("probe", "nodes.tasks.liveness", "* * * * * */5")])
    for _ in range(scheduling.BACKLOG + 10):
        due()
        scheduling.tick()
    assert OrmQ.objects.count() == scheduling.BACKLOG
