"""The placement log: what decisions saw comes back from rows, whatever else happens."""

import dataclasses
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import IntegrityError, OperationalError, transaction
from pytest_django import Settings

from localai_cluster.kit import clock
from nodes.decisions import decision_log, fleet_cache
from nodes.decisions.decision_log import Section, SnapshotRef
from nodes.loading import load_explanation
from nodes.models import PlacementLog, PlacementRecord
from nodes.reconcilers import tasks
from nodes.replicas import slots
from tests.support import hot
from tests.support.deciding import decided
from tests.support.fleet import at_once, unexpected
from tests.support.replicas import attempt

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE = timedelta(minutes=1)


def remember(now: datetime, **rows: Any) -> SnapshotRef:
    return decision_log.store_snapshot({"nodes": Section(rows)}, now=now)


def recalled(seen: SnapshotRef) -> Any:
    state = decision_log.read_snapshot(seen)
    return None if state is None else state["nodes"]


def kept() -> list[tuple[UUID, int]]:
    return list(PlacementLog.objects.order_by("id").values_list("base", "position"))


@pytest.mark.rule("I14")
def test_a_base_a_minute_and_only_what_differs_after_it() -> None:
    now = clock.now()
    first = remember(now, a=1, b=2)
    assert remember(now, a=1, b=2) == first, "nothing has changed"
    second = remember(now + MINUTE / 2, a=1, b=3)
    third = remember(now + MINUTE / 2, a=1)
    assert kept() == [(first.base, number) for number in range(3)]
    assert (second.position, third.position) == (1, 2)
    assert remember(now + 2 * MINUTE, a=1) == third, "a base of an unchanged fleet goes on"
    fourth = remember(now + 2 * MINUTE, a=2)
    assert (fourth.base != first.base, fourth.position) == (True, 0)
    assert [recalled(one) for one in (first, second, third, fourth)] == [
        {"a": 1, "b": 2},
        {"a": 1, "b": 3},
        {"a": 1},
        {"a": 2},
    ]
    assert [len(bytes(row.body)) < 60 for row in PlacementLog.objects.all()] == [True] * 4


def test_a_clock_that_was_set_back_and_an_hour_begin_a_base() -> None:
    now = clock.now()
    first = remember(now, a=1)
    second = remember(now - 2 * MINUTE, a=2)
    assert second.base != first.base
    assert remember(now + timedelta(hours=1), a=2).base != second.base


def test_a_log_that_has_grown_larger_than_its_base_ends() -> None:
    now, large = clock.now(), "x" * decision_log.MIN_LOG_SIZE
    first = remember(now, a="")
    assert remember(now, a=large).base == first.base
    assert remember(now, a="").base != first.base


def test_one_decision_is_one_statement(django_assert_num_queries: Any) -> None:
    """For any number of nodes; and none while nothing changes."""
    now = clock.now()
    for count in (1, 500):
        rows = {str(number): number for number in range(count)}
        with django_assert_num_queries(1):
            remember(now, **rows)
        with django_assert_num_queries(0):
            remember(now, **rows)
        with django_assert_num_queries(1):
            remember(now, **rows, more=1)


def test_in_a_transaction_nothing_is_continued_that_may_be_rolled_back() -> None:
    now = clock.now()
    before = remember(now, a=1)
    with transaction.atomic():
        inside = remember(now, a=2)
        assert inside.base != before.base
        transaction.set_rollback(True)
    after = remember(now, a=2)
    assert (after.base, after.position) == (before.base, 1)
    assert (recalled(inside), recalled(after)) == (None, {"a": 2})


def test_an_answer_that_was_lost_begins_a_base() -> None:
    """The entry may be there or not: this process cannot tell, so it writes no other one in that place."""
    now = clock.now()
    first = remember(now, a=1)
    create = PlacementLog.objects.create

    def lost(**fields: Any) -> None:
        create(**fields)
        raise OperationalError("server closed the connection")

    with patch.object(PlacementLog.objects, "create", lost), pytest.raises(OperationalError):
        remember(now, a=2)
    again = remember(now, a=3)
    assert (again.base == first.base, recalled(again)) == (False, {"a": 3})
    assert remember(now, a=4) == SnapshotRef(again.base, 1)


@pytest.mark.rule("I14")
def test_a_kill_between_base_and_log_or_between_log_and_record_harms_no_other() -> None:
    """The process that comes next begins a base of its own, and what was written stays as it is."""
    now = clock.now()
    hot.node("a")
    decision_log.record(decided(), now=now)
    unused = remember(now, a=1)
    decision_log.start_new_base()  # as in a process that has just begun
    hot.node("b")
    decision_log.record(decided(), now=now)
    bases = set(PlacementRecord.objects.values_list("base", flat=True))
    assert len(bases) == 2
    assert unused.base in bases
    for record in PlacementRecord.objects.all():
        assert load_explanation.replay(record) == load_explanation.recorded_decision(record)


@pytest.mark.rule("I14")
def test_two_processes_write_at_once() -> None:
    """Each has its own log; here as two states of the module in turn, while the fleet changes."""
    logs: list[Any] = [None, None]
    now = clock.now()
    for number in range(20):
        hot.node(f"n{number}")
        at = number % 2
        decision_log._log = logs[at]
        decision_log.record(decided(), now=now)
        logs[at] = decision_log._log
    assert PlacementLog.objects.values("base").distinct().count() == 2
    records = list(PlacementRecord.objects.order_by("id"))
    assert [load_explanation.replay(one) for one in records] == [
        load_explanation.recorded_decision(one) for one in records
    ]


@pytest.mark.rule("I14")
def test_threads_of_one_process_share_a_log_without_a_gap() -> None:
    """As the loads of one controller do."""
    for number in range(4):
        hot.node(f"n{number}", max_replicas_per_model=8)

    def load(model: str) -> Any:
        told = decided(model)
        assert told.explanation.node is not None
        return slots.reserve(
            told.explanation.node,
            model,
            attempt=attempt(f"{uuid4()}:1"),
            backend="b",
            now=clock.now(),
            why=told,
        )

    jobs = [lambda number=number: load(f"m{number % 5}") for number in range(24)]
    assert unexpected(at_once(*jobs)) == []
    positions = sorted(position for _, position in kept())
    assert positions == list(range(len(positions)))
    assert PlacementRecord.objects.count() == 24


def test_a_log_of_a_former_life_is_not_continued() -> None:
    """A position is written once, whatever a process believes."""
    now = clock.now()
    first = remember(now, a=1)
    with psycopg.connect(hot.database_url(), autocommit=True) as other:
        other.execute(
            "INSERT INTO placement_log (base, position, at, body) VALUES (%s, 1, %s, '{}')", [first.base, now]
        )
    second = remember(now, a=2)
    assert (second.base == first.base, recalled(second)) == (False, {"a": 2})
    with pytest.raises(IntegrityError):
        PlacementLog.objects.create(base=second.base, position=0, at=now, body=b"{}")


def test_it_is_kept_as_long_as_the_settings_say(settings: Settings) -> None:
    """The records stay, and say that they cannot be made again."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, snapshot_retention=86400.0)
    now = clock.now()
    for age in (0, 23, 25):
        decision_log.start_new_base()
        told = decided(f"m{age}")
        assert told.snapshot is not None
        decision_log.record(told, now=now)
        PlacementLog.objects.filter(base=told.snapshot.base).update(at=now - timedelta(hours=age))
    tasks.prune_timeline()
    found = {one.model_name: load_explanation.replay(one) for one in PlacementRecord.objects.all()}
    assert {name: one is None for name, one in found.items()} == {"m0": False, "m23": False, "m25": True}
    PlacementRecord.objects.filter(model_name="m25").delete()


def test_a_thousand_nodes_are_bounded() -> None:
    """A base of a thousand nodes, and a decision after a beat of one of them."""
    now = clock.now()
    hot.node("a")
    (view,) = fleet_cache.read_fleet("m")
    nodes = [dataclasses.replace(view, id=UUID(int=n), name=f"node-{n:04}") for n in range(1000)]
    decision_log.record(decided("m", nodes=nodes), now=now)
    nodes[7] = dataclasses.replace(nodes[7], free_vram=5)
    decision_log.record(decided("other", nodes=nodes), now=now)
    base, entry = (len(bytes(row.body)) for row in PlacementLog.objects.order_by("id"))
    assert base < 200_000
    assert entry < 1_000
    assert decision_log.restore([b"{}"]) == {}
