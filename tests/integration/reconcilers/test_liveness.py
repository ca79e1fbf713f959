"""The liveness pass against a real PostgreSQL, and its plan as a property."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.accounts import actors
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock
from localai_cluster.kit.transactions import Lock
from nodes.models import BackendNode, BusCredential, NodeEvent, NodeModel, ReplicaUse, WebProcess
from nodes.reconcilers import tasks
from nodes.reconcilers.liveness import (
    LateNodes,
    Limits,
    LivenessSnapshot,
    NodeLiveness,
    WebLiveness,
    _mark_absent,
    apply,
    observe,
    plan_liveness,
    read_late_nodes,
)
from nodes.registry import heartbeats, timeline
from nodes.registry.lifecycle import deactivate
from nodes.registry.timeline import Entry
from operations.executor.work import in_thread
from tests.conftest import eventually
from tests.support import hot
from tests.support.beating import Counted
from tests.support.fleet import beat, beat_of, kinds, told

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
LIMITS = Limits(node=60, web=15)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def make_node(name: str, *, heard: float, **facts: Any) -> BackendNode:
    return BackendNode.objects.create(
        **{"name": name, "address": "h:1", "approved_at": ago(999), "last_heartbeat": ago(heard), **facts}
    )


def make_nodes(count: int, *, heard: float) -> list[BackendNode]:
    return BackendNode.objects.bulk_create(
        BackendNode(
            name=f"n{number}",
            name_key=f"n{number}",
            address="h:1",
            approved_at=ago(999),
            last_heartbeat=ago(heard),
        )
        for number in range(count)
    )


@pytest.fixture(autouse=True)
def listener(request: pytest.FixtureRequest) -> None:
    """A web process that has listened all along, where there is a database."""
    if request.node.get_closest_marker("django_db"):
        request.getfixturevalue("db" if not transactional(request) else "transactional_db")
        WebProcess.objects.create(host="listener", pid=9, seen_at=NOW, hearing_since=ago(999))


def transactional(request: pytest.FixtureRequest) -> bool:
    marker = request.node.get_closest_marker("django_db")
    return bool(marker and marker.kwargs.get("transaction"))


def run() -> tuple[int, int]:
    return apply(plan_liveness(observe(), NOW, LIMITS), NOW, LIMITS)


def status(node: BackendNode) -> str:
    return str(BackendNode.objects.values_list("status", flat=True).get(pk=node.pk))


@pytest.mark.rule("R5.2", "R5.4", "C15", "I13")
@given(st.lists(st.floats(0, 300)))
def test_exactly_those_silent_longer_than_the_limit_are_planned(ages: list[float]) -> None:
    """R5.4: strictly longer than the limit; I13: a node that answers in time is never declared gone."""
    nodes = [NodeLiveness(uuid4(), ago(age)) for age in ages]
    webs = [WebLiveness(uuid4(), ago(age), ago(999)) for age in [*ages, 0.0]]
    plan = plan_liveness(LivenessSnapshot(nodes=nodes, processes=webs), NOW, LIMITS)
    assert plan.nodes == [node.id for node in nodes if node.at and NOW - node.at > timedelta(seconds=60)]
    assert plan.processes == [web.id for web in webs if NOW - web.at > timedelta(seconds=15)]


@pytest.mark.rule("R5.5")
@pytest.mark.rule("H7")
@given(st.lists(st.tuples(st.floats(0, 120), st.none() | st.floats(0, 120), st.none() | st.floats(0, 120))))
def test_exactly_those_heard_and_answering_after_they_were_marked_are_well_again(
    rows: list[tuple[float, float | None, float | None]],
) -> None:
    """Both strictly later than marked, and not silent; who was only heard is asked."""
    nodes = [
        NodeLiveness(
            uuid4(), ago(heard), None if since is None else ago(since), None if asked is None else ago(asked)
        )
        for heard, since, asked in rows
    ]
    webs = [WebLiveness(uuid4(), ago(0), ago(999))]
    plan = plan_liveness(LivenessSnapshot(nodes=nodes, processes=webs), NOW, LIMITS)
    back = [
        (node.id, asked is not None and ago(asked) > ago(since))
        for node, (heard, since, asked) in zip(nodes, rows, strict=True)
        if since is not None and ago(heard) > ago(since) and NOW - ago(heard) <= timedelta(seconds=60)
    ]
    assert plan.recovered == [id for id, hears in back if hears]
    assert plan.doubtful == [id for id, hears in back if not hears]
    assert not set(plan.recovered) & set(plan.nodes)


@pytest.mark.parametrize("hearing", [None, 59.0, 61.0])
def test_silence_counts_only_while_somebody_could_hear(hearing: float | None) -> None:
    """I12: after an outage of all web processes or the database no node is declared gone for that outage."""
    nodes = [NodeLiveness(uuid4(), ago(300)), NodeLiveness(uuid4(), None)]
    webs = [] if hearing is None else [WebLiveness(uuid4(), ago(1), ago(hearing))]
    plan = plan_liveness(LivenessSnapshot(nodes=nodes, processes=webs), NOW, LIMITS)
    assert plan.nodes == ([node.id for node in nodes] if hearing == 61.0 else [])


@pytest.mark.rule("R5.3", "R5.4", "R5.6", "R5.8", "R1.20", "R1.37")
@pytest.mark.rule("T-HLT-1", "T-HLT-2", "T-HLT-6", "T-HLT-8")
@pytest.mark.django_db
def test_silent_nodes_go_offline_and_lose_their_replicas() -> None:
    """R5.4, R5.8, R1.20: healthy, unhealthy and draining (D-DRAIN-SILENT) ones alike.

    Fresh and pending ones are left alone.
    """
    silent = [
        make_node("healthy", heard=61),
        make_node("unhealthy", heard=61, unhealthy_at=ago(70)),
        make_node("draining", heard=61, drained_at=ago(70)),
    ]
    fresh, pending = make_node("fresh", heard=60), make_node("pending", heard=999, approved_at=None)
    for node in (silent[0], fresh):
        NodeModel.objects.create(node=node, model_name="m", phase="serving", address="h:2")
    assert run() == (3, 0)
    assert [status(node) for node in silent] == ["offline"] * 3
    assert (status(fresh), status(pending)) == ("healthy", "pending")
    assert [row.node_id for row in NodeModel.objects.all()] == [fresh.pk]
    assert kinds(silent[0]) == ["fell_silent"]
    assert run() == (0, 0)


@pytest.mark.rule("R5.5", "R1.17", "T-HLT-4", "T-HLT-11")
@pytest.mark.django_db
def test_an_unhealthy_node_that_was_heard_since_is_well_again() -> None:
    """Its replicas were kept for that; a drain stays, pending, offline and unheard nodes are left alone."""
    marked = {"unhealthy_at": ago(20), "unhealthy_by": "commands", "unhealthy_reason": "no answer"}
    answered = {"inventory_at": ago(5)}
    heard = make_node("heard", heard=10, **marked, **answered)
    drained = make_node("drained", heard=10, drained_at=ago(30), **marked, **answered)
    others = [
        make_node("unheard", heard=30, **marked),
        make_node("pending", heard=10, approved_at=None, **marked),
        make_node("left", heard=10, offline_at=ago(15), **marked),
    ]
    NodeModel.objects.create(node=heard, model_name="m", phase="serving", address="h:2")
    assert run() == (0, 0)
    assert (status(heard), status(drained)) == ("healthy", "draining")
    assert [status(node) for node in others] == ["unhealthy", "pending", "offline"]
    assert NodeModel.objects.count() == 1
    stored = BackendNode.objects.get(pk=heard.pk)
    assert (stored.unhealthy_at, stored.unhealthy_by, stored.unhealthy_reason, stored.revision) == (
        None,
        "",
        "",
        1,
    )
    (event,) = told(heard)
    assert (event.kind, event.actor_kind, event.actor) == ("marked_healthy", "task", "liveness")
    assert [kinds(node) for node in (drained, *others)] == [["marked_healthy"], [], [], []]
    run()
    assert kinds(heard) == ["marked_healthy"]


@pytest.mark.rule("H7", "R6.31")
@pytest.mark.django_db
def test_a_node_that_beats_but_hears_nothing_stays_unhealthy_and_is_asked() -> None:
    """Its beats made it healthy again and again, and work for it failed as often until it was given up."""
    marked = {"unhealthy_at": ago(20), "unhealthy_by": "commands", "unhealthy_reason": "no answer"}
    deaf = make_node("deaf", heard=10, inventory_at=ago(30), inventory_due_at=ago(-250), **marked)
    assert run() == (0, 0)
    assert status(deaf) == "unhealthy"
    deaf.refresh_from_db()
    assert deaf.inventory_due_at is not None
    assert deaf.inventory_due_at <= NOW
    BackendNode.objects.update(inventory_at=ago(1))
    run()
    assert status(deaf) == "healthy"


@pytest.mark.rule("R5.5", "R5.7")
@pytest.mark.django_db
def test_a_silent_node_comes_back_by_its_beat_and_one_that_left_does_not() -> None:
    """In the order in which it happens: beat, pass, beat. Unhealthy and silent: both end."""
    silent, left = make_node("silent", heard=61, unhealthy_at=ago(90)), make_node("left", heard=1)
    for node in (silent, left):
        BackendNode.objects.filter(pk=node.pk).update(fingerprint=hash_secret(node.name))
    deactivate(left.pk, now=ago(0.5))
    run()
    assert (status(silent), status(left)) == ("offline", "offline")
    beat(*(beat_of(node, secret=node.name, at=NOW) for node in (silent, left)))
    assert (status(silent), status(left)) == ("unhealthy", "offline")
    BackendNode.objects.filter(pk=silent.pk).update(inventory_at=NOW)
    run()
    assert (status(silent), status(left)) == ("healthy", "offline")


@pytest.mark.rule("R5.6")
@pytest.mark.django_db
def test_pending_never_becomes_healthy_by_going_silent() -> None:
    """R5.6: approval is a fact of its own."""
    node = make_node("pending", heard=999, approved_at=None)
    run()
    BackendNode.objects.filter(pk=node.pk).update(offline_at=None, last_heartbeat=NOW)
    assert status(node) == "pending"


@pytest.mark.django_db
def test_a_dead_web_process_gives_its_counts_back() -> None:
    """I8: in-flight is the sum over live processes; a second pass takes nothing twice."""
    node = make_node("n", heard=0)
    replica = NodeModel.objects.create(node=node, model_name="m", phase="serving", address="h:2", in_flight=5)
    dead = WebProcess.objects.create(host="h", pid=1, seen_at=ago(16))
    alive = WebProcess.objects.create(host="h", pid=2, seen_at=ago(1))
    ReplicaUse.objects.create(process=dead, replica=replica, count=3)
    ReplicaUse.objects.create(process=alive, replica=replica, count=2)
    assert run() == (0, 1)
    assert run() == (0, 0)
    replica.refresh_from_db()
    assert replica.in_flight == 2
    assert list(ReplicaUse.objects.values_list("process_id", flat=True)) == [alive.pk]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("leave", [run, lambda: deactivate(BackendNode.objects.get().pk, now=NOW)])
def test_replicas_go_in_the_lock_order_of_the_hot_path(leave: Callable[[], Any]) -> None:
    """Rule 2: replica first, then its uses; the other way round a pick and a lost node end in a deadlock."""
    node = make_node("n", heard=61)
    replica = NodeModel.objects.create(node=node, model_name="m", phase="serving", address="h:2", in_flight=1)
    use = ReplicaUse.objects.create(
        process=WebProcess.objects.create(host="h", pid=1, seen_at=NOW), replica=replica, count=1
    )
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with ThreadPoolExecutor(1) as threads, psycopg.connect(hot.database_url()) as pick:
        pick.execute("SELECT 1 FROM node_models WHERE id = %s FOR UPDATE", [replica.pk])
        leaving = threads.submit(closing, leave)
        eventually(lambda: rows(waiting), what="the pass waits for the pick")
        pick.execute("UPDATE replica_uses SET count = 2 WHERE id = %s", [use.pk])
        pick.commit()
        leaving.result(timeout=60)
    assert NodeModel.objects.count() == 0


def rows(query: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def closing(work: Callable[[], Any]) -> None:
    """Runs `work` in a thread of its own, with a connection of its own."""
    try:
        work()
    finally:
        connection.close()


@pytest.mark.rule("T-HLT-3", "T-HLT-5", "T-HLT-9", "T-HLT-10")
@pytest.mark.django_db
@pytest.mark.parametrize("count", [10, 1000])
def test_a_pass_costs_the_same_for_ten_and_for_a_thousand_nodes(
    count: int, django_assert_num_queries: Any
) -> None:
    """Fast by construction: three reads when nothing is to be done. Fresh nodes are left as they are."""
    make_nodes(count, heard=1)
    with django_assert_num_queries(3):
        run()


@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, 40])
def test_a_pass_with_work_costs_the_same_for_few_and_for_many(
    count: int, django_assert_num_queries: Any
) -> None:
    for number in range(count):
        gone = make_node(f"gone{number}", heard=99)
        NodeModel.objects.create(node=gone, model_name="m", phase="serving", address="h:2")
        make_node(f"back{number}", heard=1, unhealthy_at=ago(5), inventory_at=ago(2))
        make_node(f"deaf{number}", heard=1, unhealthy_at=ago(5), inventory_due_at=ago(-99))
    with django_assert_num_queries(26):
        assert run() == (count, 0)
    assert NodeEvent.objects.count() == 2 * count


@pytest.mark.rule("R5.4", "R1.17")
@pytest.mark.django_db
@pytest.mark.parametrize("count", [10, 1000])
def test_absent_nodes_are_read_and_marked_at_the_same_cost(
    count: int, django_assert_num_queries: Any
) -> None:
    """Issue 22, item 7: one read a pass, three if a node is late, and a constant number to mark them.

    A node that was heard meanwhile is left alone.
    """
    fleet = make_nodes(4 * count, heard=1)
    with django_assert_num_queries(1):
        assert read_late_nodes([], ["U1"], web=LIMITS.web, now=NOW) == LateNodes([], None)
    nodes = fleet[:count]
    BackendNode.objects.filter(pk__in=[node.pk for node in nodes]).update(last_heartbeat=ago(40))
    fresh, known = make_node("fresh", heard=1), make_node("known", heard=3)
    BusCredential.objects.create(public_key="U1", node_id=known.pk, issued_at=NOW, expires_at=NOW)
    with django_assert_num_queries(3):
        late = read_late_nodes([], ["U1"], web=LIMITS.web, now=NOW)
    assert {node.id for node in late.nodes} == {*(node.pk for node in nodes), known.pk}
    assert late.hearing_since == ago(999)
    assert read_late_nodes([node.pk for node in fleet], [], web=LIMITS.web, now=NOW) == LateNodes([], None)
    halves = [node.pk for node in nodes[::2]], [node.pk for node in nodes[1::2]]
    with django_assert_num_queries(11):
        _mark_absent([*halves[0], fresh.pk], [*halves[1], fresh.pk], doubt=5, gone=30, now=NOW)
    assert Counter(BackendNode.objects.values_list("status", flat=True)) == {
        "unhealthy": count // 2,
        "offline": count // 2,
        "healthy": 3 * count + 2,
    }
    assert told(nodes[0])[0].cause == "no heartbeat for more than 5 s, and nothing listens for it on the bus"


@pytest.mark.rule("R5.4", "R1.17")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("interval", [10.0, 45.0])
async def test_a_heartbeat_is_late_by_the_interval_of_its_worker(database: Counted, interval: float) -> None:
    """Else most nodes of a fleet with slow heartbeats are late at any time, and none of them is probed."""

    def fleet() -> list[BackendNode]:
        return [make_node(f"w{n}", heard=0, fingerprint=hash_secret(str(n))) for n in range(24)]

    nodes, start = await in_thread(fleet), NOW + timedelta(minutes=10)
    for beats in range(3):
        for number, node in enumerate(nodes):
            # The first is killed before its last heartbeat; all others send them one after another.
            if beats < 2 or number:
                at = start + timedelta(seconds=interval * (beats + number / len(nodes)))
                await heartbeats.record(database, [heartbeats.Beat(node.pk, node.fingerprint, at)])
    now = start + timedelta(seconds=interval * 2.9)
    late = await in_thread(lambda: read_late_nodes([], [], web=LIMITS.web, now=now))
    assert [(node.id, node.late_after.total_seconds()) for node in late.nodes] == [
        (nodes[0].pk, interval * 1.2)
    ]


async def limit_after(database: Counted, node: BackendNode, beats: Sequence[float]) -> float:
    """Write heartbeats at these seconds after NOW; return the silence after which the next is late."""
    for seconds in beats:
        beat = heartbeats.Beat(node.pk, node.fingerprint, NOW + timedelta(seconds=seconds))
        assert set((await heartbeats.record(database, [beat])).values()) == {None}
    await in_thread(node.refresh_from_db)
    return node.heartbeat_late_after.total_seconds()


@pytest.mark.rule("R5.4", "R1.17")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "extra", [[20, 21], [38.6, 39.6], [20, 20.1, 21.1, 22.1, 23.1, 24.1], [38, 39, 77, 78]], ids=str
)
async def test_a_node_is_not_late_before_its_heartbeat_after_extra_ones(
    database: Counted, extra: list[float]
) -> None:
    """A worker with an interval of 45 s sends two at each end of an engine; then its interval begins."""
    node = await in_thread(lambda: make_node("w", heard=45, fingerprint="f"))
    limit = await limit_after(database, node, [0, *extra])
    assert 45 < limit < 54
    assert await limit_after(database, node, [extra[-1] + 45]) == 54


@pytest.mark.django_db(transaction=True)
async def test_a_lost_heartbeat_delays_probes_for_two_minutes(database: Counted) -> None:
    """docs/killed-workers.md: the limit of a worker with an interval of 10 s is soon as before."""
    node = await in_thread(lambda: make_node("w", heard=10, fingerprint="f"))
    limits = [await limit_after(database, node, [seconds]) for seconds in range(0, 160, 10) if seconds != 10]
    assert limits[:2] == [12, 24]
    assert limits == [12, *sorted(limits[1:], reverse=True)]
    assert limits[13:] == [12, 12]


@pytest.mark.django_db(transaction=True)
async def test_the_limit_is_at_most_the_silence_that_makes_a_node_offline(database: Counted) -> None:
    """Neither a heartbeat just before it, nor one after an outage in which no node was marked, exceeds it."""
    node = await in_thread(lambda: make_node("w", heard=10, fingerprint="f"))
    assert await limit_after(database, node, [0, 600]) == 12
    assert await limit_after(database, node, [659]) == 60


@pytest.mark.django_db(transaction=True)
async def test_an_absence_is_no_interval(database: Counted) -> None:
    """A node that returns after a day, and a heartbeat that comes twice, are late as before."""

    def absent() -> BackendNode:
        return make_node("w", heard=86400, fingerprint="f", offline_at=ago(80000), offline_recovers=True)

    node = await in_thread(absent)
    for seconds in (0, 20, 20, 15):
        beat = heartbeats.Beat(node.pk, "f", NOW + timedelta(seconds=seconds))
        assert set((await heartbeats.record(database, [beat])).values()) == {None}
        await in_thread(node.refresh_from_db)
        assert node.heartbeat_late_after == timedelta(seconds=24 if seconds else 12)


@pytest.mark.rule("R5.1")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("task", "lock"),
    [
        (tasks.liveness, Lock.LIVENESS),
        (tasks.finish_drains, Lock.DRAINS),
        (tasks.prune_timeline, Lock.TIMELINE),
    ],
    ids=["liveness", "drains", "timeline"],
)
def test_a_pass_leaves_at_once_if_another_process_is_at_it(task: Callable[[], None], lock: Lock) -> None:
    """Each has work here; with the lock held elsewhere none of it is done, without it all."""
    node = make_node("n", heard=0, last_heartbeat=clock.now() - timedelta(days=2))
    drained = make_node("d", heard=0, last_heartbeat=clock.now(), drained_at=ago(9))
    NodeModel.objects.create(node=drained, model_name="m", phase="serving", address="h:2")
    WebProcess.objects.update(seen_at=clock.now())
    timeline.record(Entry(node.pk, "n", NodeEvent.Kind.LABELS, actors.WORKER), at=NOW - timedelta(days=4000))

    def left() -> tuple[Any, ...]:
        done = status(node), NodeModel.objects.count(), NodeEvent.objects.filter(kind="labels").count()
        return done

    untouched = ("healthy", 1, 1)
    with psycopg.connect(hot.database_url()) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [int(lock)])
        task()
        assert left() == untouched
    task()
    assert sum(one != other for one, other in zip(left(), untouched, strict=True)) == 1
