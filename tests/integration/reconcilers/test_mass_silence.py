"""The brake on mass failure on real rows (D-MASS-SILENCE): replicas stay, an alarm is shown, and it ends."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import RequestTimeout
from nodes.backends import inventory
from nodes.live import watch
from nodes.models import BackendNode, MassSilence, NodeModel, WebProcess
from nodes.reconcilers import tasks
from nodes.reconcilers.liveness import Limits, apply, observe, plan_liveness
from nodes.registry import mass_silence
from nodes.replicas import checks
from tests.support import hot
from tests.support.bus import PlayedBus
from tests.support.fleet import kinds, told

pytestmark = [pytest.mark.django_db, pytest.mark.rule("R5.4")]

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
LIMITS = Limits(node=60, web=15, hold=300)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.fixture
def fleet() -> list[BackendNode]:
    """27 nodes with a replica each, and a web process that hears them."""
    WebProcess.objects.create(host="h", pid=1, seen_at=later(9999), hearing_since=later(-999))
    nodes = [hot.node(f"n{number}", last_heartbeat=NOW, approved_at=NOW) for number in range(27)]
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
    heard(fleet[:15], 95)
    heard(fleet[24:], 5)
    assert (run(62), left()) == (0, 27)
    held = mass_silence.current_hold()
    assert str(held) == "9 of 27 nodes fell silent at once; kept until 10:06 UTC"
    assert (run(67), left()) == (0, 27)
    held = mass_silence.current_hold()
    assert held is not None
    assert (held.since, held.silent) == (later(62), 12)
    assert watch.read_snapshot().mass_hold == held
    assert [kinds(node) for node in (fleet[0], fleet[15], fleet[24])] == [
        [],
        ["silence_held"],
        ["silence_held"],
    ]
    (event,) = told(fleet[24])
    assert (event.at, event.status_after, event.actor) == (later(67), "healthy", "liveness")
    heard(fleet, 95)
    assert (run(97), left(), mass_silence.current_hold()) == (0, 27, None)


def test_who_is_not_heard_in_time_is_offline(fleet: list[BackendNode]) -> None:
    """Another process goes on with the hold, for it is a row. Then a new silence is a new hold."""
    heard(fleet[:4], 999)
    assert (run(70), run(369), left()) == (0, 0, 27)
    assert (run(370), left(), mass_silence.current_hold()) == (23, 4, None)
    BackendNode.objects.filter(offline_at__isnull=False).update(offline_at=None, last_heartbeat=later(999))
    assert run(371) == 0
    assert run(999 + 61) == 0
    held = mass_silence.current_hold()
    assert held is not None
    assert (held.silent, held.of) == (27, 27)


def test_once_few_are_left_they_are_judged_one_by_one(fleet: list[BackendNode]) -> None:
    """After three beats, for while a cut heals the nodes are heard one after another."""
    heard(fleet[:12], 999)
    run(70)
    heard(fleet[12:18], 999)
    assert (run(80), left()) == (0, 27)
    assert (run(109), left()) == (0, 27)
    assert (run(110), left(), mass_silence.current_hold()) == (9, 18, None)


def test_few_are_not_held_and_neither_is_anything_without_the_setting(fleet: list[BackendNode]) -> None:
    heard(fleet[:18], 999)
    assert (run(70), left()) == (9, 18)
    assert (run(999 + 70, Limits(node=60, web=15)), left()) == (18, 0)


def test_ten_of_twelve_nodes_are_offline_after_sixty_seconds(fleet: list[BackendNode]) -> None:
    """Review R11: in a small fleet a few machines that are switched off are more than a third of it."""
    NodeModel.engines.filter(node__in=fleet[12:]).delete()
    BackendNode.objects.filter(pk__in=[node.pk for node in fleet[12:]]).delete()
    heard(fleet[:2], 999)
    assert (run(60), left()) == (0, 12)
    assert (run(61), left(), mass_silence.current_hold()) == (10, 2, None)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("case", ["nobody listens", "it does not answer", "our connection is new"])
async def test_a_kept_node_without_a_listener_on_the_bus_is_offline_at_once(
    fleet: list[BackendNode], case: str
) -> None:
    """Review R11: asked through a live connection, so that it is not we who are cut off from it."""
    bus, now = PlayedBus(), clock.now()
    subject = messages.subject("backend.list", str(fleet[0].id))

    def all_silent() -> BackendNode:
        WebProcess.objects.update(seen_at=now, hearing_since=now - timedelta(hours=1))
        since = now - timedelta(seconds=70)
        BackendNode.objects.update(last_heartbeat=since, inventory_due_at=now + timedelta(minutes=5))
        tasks.liveness()
        assert left() == 27
        return BackendNode.objects.get(pk=fleet[0].pk)

    node = await hot.in_thread(all_silent)
    assert node.inventory_due_at is not None
    assert node.inventory_due_at <= clock.now(), "a controller asks it now"
    if case == "it does not answer":
        bus.replies[subject] = RequestTimeout("late")
    if case == "our connection is new":
        bus.connected_since = clock.monotonic()
    assert not await inventory.request_list(bus, node)
    assert len(bus.asked[subject]) == 1
    await hot.in_thread(node.refresh_from_db)
    gone = case == "nobody listens"
    assert (node.status, await hot.in_thread(left)) == (("offline", 26) if gone else ("healthy", 27))
    if gone:
        assert node.offline_reason == "no heartbeat for more than 60 s, and nothing listens for it on the bus"
    await hot.in_thread(tasks.liveness)
    held = await hot.in_thread(mass_silence.current_hold)
    assert held is not None
    assert (held.silent, held.of) == ((26, 26) if gone else (27, 27))


@pytest.mark.django_db(transaction=True)
async def test_a_node_that_is_heard_or_was_not_kept_is_not_given_up_for_a_missing_listener(
    fleet: list[BackendNode],
) -> None:
    """Review R11: without the hold its silence alone counts."""

    def give_up(at: float) -> bool:
        return mass_silence.release_silent_node(fleet[0].id, limit=60, actor=actors.CONTROLLER, now=later(at))

    assert not await hot.in_thread(lambda: give_up(99)), "nothing is kept"
    await hot.in_thread(lambda: run(70))
    await hot.in_thread(lambda: heard(fleet[:1], 80))
    assert not await hot.in_thread(lambda: give_up(99)), "it was heard"
    assert await hot.in_thread(left) == 27


def test_the_state_pass_leaves_silent_nodes_to_the_brake(fleet: list[BackendNode]) -> None:
    """Who is cut off from a node would find its engines unreachable."""
    heard(fleet[:4], 70)
    NodeModel.objects.update(updated_at=later(-999))
    claimed = checks.claim_suspects(heartbeat_since=later(10), now=later(70))
    assert {one.node_id for one in claimed} == {node.pk for node in fleet[:4]}


@pytest.mark.parametrize("count", [25, 60])
def test_a_hold_costs_the_same_for_few_and_for_many(count: int, django_assert_num_queries: Any) -> None:
    for number in range(count):
        hot.replica(hot.node(f"n{number}", last_heartbeat=NOW))
    WebProcess.objects.create(host="h", pid=1, seen_at=later(9999), hearing_since=later(-999))
    with django_assert_num_queries(17):
        run(70)
    with django_assert_num_queries(9):
        run(75)
    assert len(MassSilence.objects.get().nodes) == count


def test_the_task_holds_as_the_setting_says(fleet: list[BackendNode]) -> None:
    now = clock.now()
    WebProcess.objects.update(seen_at=now, hearing_since=now - timedelta(hours=1))
    BackendNode.objects.update(last_heartbeat=now - timedelta(seconds=70))
    tasks.liveness()
    held = mass_silence.current_hold()
    assert held is not None
    assert ((held.until - held.since).total_seconds(), left()) == (300, 27)
