"""The brake on mass failure on real rows (D-MASS-SILENCE): replicas stay, an alarm is shown, and it ends."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from localai_cluster import clock
from nodes.live import watch
from nodes.models import BackendNode, MassSilence, NodeModel, WebProcess
from nodes.reconcilers import tasks
from nodes.reconcilers.liveness import Limits, apply, observe, plan_liveness
from nodes.registry import mass_silence
from nodes.replicas import checks
from tests.support import hot
from tests.support.fleet import kinds, told

pytestmark = [pytest.mark.django_db, pytest.mark.rule("R5.4")]

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
LIMITS = Limits(node=60, web=15, hold=300)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.fixture
def fleet() -> list[BackendNode]:
    """Nine nodes with a replica each, and a web process that hears them."""
    WebProcess.objects.create(host="h", pid=1, seen_at=later(9999), hearing_since=later(-999))
    nodes = [hot.node(f"n{number}", last_heartbeat=NOW, approved_at=NOW) for number in range(9)]
    for node in nodes:
        hot.replica(node)
    return nodes


def heard(nodes: list[BackendNode], at: float) -> None:
    BackendNode.objects.filter(pk__in=[node.pk for node in nodes]).update(last_heartbeat=later(at))


def run(at: float, limits: Limits = LIMITS) -> int:
    now = later(at)
    return apply(plan_liveness(observe(), now, limits), now, limits)[0]


def left() -> int:
    return NodeModel.objects.count()


def test_a_cut_keeps_the_rows_and_ends_with_the_next_beats(fleet: list[BackendNode]) -> None:
    """The beats of one interval pass the limit in several passes; the first of them already holds."""
    heard(fleet[:5], 95)
    heard(fleet[8:], 5)
    assert (run(62), left()) == (0, 9)
    held = mass_silence.standing()
    assert str(held) == "3 of 9 nodes fell silent at once; kept until 10:06 UTC"
    assert (run(67), left()) == (0, 9)
    held = mass_silence.standing()
    assert held is not None
    assert (held.since, held.silent) == (later(62), 4)
    assert watch.look().held == held
    assert [kinds(node) for node in (fleet[0], fleet[5], fleet[8])] == [
        [],
        ["silence_held"],
        ["silence_held"],
    ]
    (event,) = told(fleet[8])
    assert (event.at, event.status_after, event.actor) == (later(67), "healthy", "liveness")
    heard(fleet, 95)
    assert (run(97), left(), mass_silence.standing()) == (0, 9, None)


def test_who_is_not_heard_in_time_is_offline(fleet: list[BackendNode]) -> None:
    """Another process goes on with the hold, for it is a row. Then a new silence is a new hold."""
    heard(fleet[:4], 999)
    assert (run(70), run(369), left()) == (0, 0, 9)
    assert (run(370), left(), mass_silence.standing()) == (5, 4, None)
    assert run(371) == 0
    assert run(999 + 61) == 0
    held = mass_silence.standing()
    assert held is not None
    assert (held.silent, held.of) == (4, 4)


def test_once_few_are_left_they_are_judged_one_by_one(fleet: list[BackendNode]) -> None:
    """After three beats, for while a cut heals the nodes are heard one after another."""
    heard(fleet[:4], 999)
    run(70)
    heard(fleet[4:6], 999)
    assert (run(80), left()) == (0, 9)
    assert (run(109), left()) == (0, 9)
    assert (run(110), left(), mass_silence.standing()) == (3, 6, None)


def test_few_are_not_held_and_neither_is_anything_without_the_setting(fleet: list[BackendNode]) -> None:
    heard(fleet[:6], 999)
    assert (run(70), left()) == (3, 6)
    assert (run(999 + 70, Limits(node=60, web=15)), left()) == (6, 0)


def test_the_state_pass_leaves_silent_nodes_to_the_brake(fleet: list[BackendNode]) -> None:
    """Who is cut off from a node would find its engines unreachable."""
    heard(fleet[:4], 70)
    NodeModel.objects.update(updated_at=later(-999))
    claimed = checks.claim(heard_since=later(10), now=later(70))
    assert {one.node_id for one in claimed} == {node.pk for node in fleet[:4]}


@pytest.mark.parametrize("count", [5, 40])
def test_a_hold_costs_the_same_for_few_and_for_many(count: int, django_assert_num_queries: Any) -> None:
    for number in range(count):
        hot.replica(hot.node(f"n{number}", last_heartbeat=NOW))
    WebProcess.objects.create(host="h", pid=1, seen_at=later(9999), hearing_since=later(-999))
    with django_assert_num_queries(14):
        run(70)
    with django_assert_num_queries(6):
        run(75)
    assert len(MassSilence.objects.get().nodes) == count


def test_the_task_holds_as_the_setting_says(fleet: list[BackendNode]) -> None:
    now = clock.now()
    WebProcess.objects.update(seen_at=now, hearing_since=now - timedelta(hours=1))
    BackendNode.objects.update(last_heartbeat=now - timedelta(seconds=70))
    tasks.liveness()
    held = mass_silence.standing()
    assert held is not None
    assert ((held.until - held.since).total_seconds(), left()) == (300, 9)
