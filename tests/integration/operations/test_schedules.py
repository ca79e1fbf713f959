"""Schedules declared in code: made once, ticked without a pile-up, an operator's pause kept."""

from datetime import timedelta
from typing import Any

import pytest
from django_q.models import Failure, OrmQ, Schedule, Success

from localai_cluster.kit import clock, periodic
from localai_cluster.kit.periodic import RecurringTask
from nodes.reconcilers.tasks import SCHEDULES, prune_timeline
from operations.reconcilers.tasks import SCHEDULES as LEDGER_SCHEDULES

pytestmark = pytest.mark.django_db(transaction=True)

EVERY = [*SCHEDULES, *LEDGER_SCHEDULES]


def due() -> None:
    """Makes every schedule due."""
    Schedule.objects.update(next_run=clock.now() - timedelta(seconds=1))


def test_declared_schedules_are_rows_and_keep_an_operators_pause() -> None:
    """Declared in code, visible in the admin; what an operator changed there stays."""
    periodic.ensure_schedules(EVERY)
    Schedule.objects.filter(name=EVERY[0].name).update(repeats=0, cron="0 0 * * *")
    periodic.ensure_schedules(EVERY)
    assert set(Schedule.objects.values_list("name", "func")) == {(one.name, one.function) for one in EVERY}
    assert Schedule.objects.values_list("repeats", "cron").get(name=EVERY[0].name) == (0, "0 0 * * *")


def test_a_due_schedule_is_enqueued_once() -> None:
    """A tick enqueues what is due; the next one finds it rescheduled, here to the first of January."""
    periodic.ensure_schedules([RecurringTask("rare", "nodes.reconcilers.tasks.liveness", "0 0 1 1 * 0")])
    due()
    periodic.enqueue_due_schedules()
    periodic.enqueue_due_schedules()
    assert OrmQ.objects.count() == 1


def test_a_tick_with_nothing_due_is_one_query(django_assert_num_queries: Any) -> None:
    """The controller ticks every second, and mostly nothing is due."""
    periodic.ensure_schedules([RecurringTask("rare", "nodes.reconcilers.tasks.liveness", "0 0 1 1 * 0")])
    due()
    periodic.enqueue_due_schedules()
    with django_assert_num_queries(1):
        periodic.enqueue_due_schedules()


def test_every_due_schedule_is_enqueued() -> None:
    """One task each."""
    periodic.ensure_schedules(EVERY)
    due()
    periodic.enqueue_due_schedules()
    assert OrmQ.objects.count() == len(EVERY)


def test_nothing_piles_up_while_no_one_takes_tasks() -> None:
    """A task cluster that was away for an hour does not come back to a thousand identical passes."""
    periodic.ensure_schedules([RecurringTask("probe", "nodes.reconcilers.tasks.liveness", "* * * * * */5")])
    for _ in range(periodic.MAX_BACKLOG + 10):
        due()
        periodic.enqueue_due_schedules()
    assert OrmQ.objects.count() == periodic.MAX_BACKLOG


@pytest.mark.rule("C14", "R5.1")
def test_the_liveness_pass_comes_every_five_seconds() -> None:
    """D-LIVENESS-OFTEN."""
    (liveness,) = [one for one in SCHEDULES if one.function.endswith(".tasks.liveness")]
    assert liveness.cron == "* * * * * */5"


def _plant_run(number: int, *, age: timedelta, success: bool = False) -> None:
    at, model = clock.now() - age, Success if success else Failure
    model.objects.create(id=f"run{number}", name="n", func="f", started=at, stopped=at, success=success)


def test_failed_runs_are_not_stored_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that fails every five seconds adds 17,000 rows a day; django-q2 deletes only successful ones."""
    monkeypatch.setattr(periodic, "MAX_FAILURES", 3)
    for number in range(5):
        _plant_run(number, age=timedelta(minutes=number))
    _plant_run(10, age=timedelta(days=400), success=True)
    prune_timeline()
    assert set(Failure.objects.values_list("id", flat=True)) == {"run0", "run1", "run2"}
    Failure.objects.filter(id="run2").update(stopped=clock.now() - timedelta(days=400))
    prune_timeline()
    assert set(Failure.objects.values_list("id", flat=True)) == {"run0", "run1"}
    assert Success.objects.count() == 1
