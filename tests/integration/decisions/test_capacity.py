"""Reservations of memory and finders against a real PostgreSQL (D-VRAM-LOADS, D-NODES-ONCE)."""

import asyncio
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from localai_cluster.kit.database_pool import Pool
from nodes.decisions import fleet_cache
from nodes.loading import load_explanation
from nodes.models import BackendNode, NodeModel
from nodes.placement.choose import NO_NEED, Need, Reason, choose_node
from nodes.registry import heartbeats
from nodes.replicas import drains, engines, fleet_queries, reserved_memory, slots, unload_requests
from nodes.replicas.slots import Slot
from tests.support import api, hot
from tests.support.effort import EFFORT
from tests.support.fleet import at_once, unexpected
from tests.support.replicas import attempt, columns, forget_nodes, owner_of, publish

GB = 10**9
Queries = Callable[[int], Any]


def column(node: BackendNode) -> int:
    return BackendNode.objects.values_list("reserved_vram", flat=True).get(pk=node.pk)


def free(node: BackendNode) -> int:
    (seen,) = fleet_cache.read_fleet("any", allowed_nodes=[node.pk])
    return seen.free_vram


def begun(node: BackendNode, model: str, need: int, *, required: bool = False, mark: str = "") -> Slot | None:
    """A load takes its slot."""
    (view,) = fleet_cache.read_fleet(model, allowed_nodes=[node.pk])
    wants = Need(vram=need, vram_required=required)
    slot = slots.reserve(
        view, model, attempt=attempt(mark or f"{model}:1"), backend="b", now=clock.now(), need=wants
    )
    return slot if isinstance(slot, Slot) else None


def published(slot: Slot, mark: str) -> None:
    assert publish(slot, attempt(mark))


@pytest.mark.django_db
@pytest.mark.rule("R1.51", "R1.54", "T-REG-60", "T-REG-79", "T-REG-80", "T-REG-81")
def test_a_reservation_is_one_statement_that_fits_or_changes_nothing(
    django_assert_num_queries: Queries,
) -> None:
    """Neither the second one that does not fit nor one of nothing moves a column; `updated_at` stays."""
    node = hot.node(available_vram=16 * GB)
    assert column(node) == 0
    with django_assert_num_queries(1):
        assert reserved_memory.reserve(node.pk, 10 * GB, now=clock.now())
    assert column(node) == 10 * GB
    with django_assert_num_queries(1):
        assert not reserved_memory.reserve(node.pk, 7 * GB, now=clock.now())
    with django_assert_num_queries(0):
        assert reserved_memory.reserve(node.pk, 0, now=clock.now())
    assert column(node) == 10 * GB
    assert reserved_memory.reserve(node.pk, 6 * GB, now=clock.now())
    assert api.node(node.pk).updated_at == node.updated_at


@pytest.mark.django_db
@pytest.mark.rule("R1.52", "R1.54", "T-REG-82", "T-REG-83")
def test_a_release_never_goes_below_zero(django_assert_num_queries: Queries) -> None:
    """More than is reserved is no error; a release of nothing is no statement; `updated_at` stays."""
    node, now = hot.node(available_vram=16 * GB), clock.now()
    assert reserved_memory.reserve(node.pk, 10 * GB, now=now)
    with django_assert_num_queries(1):
        reserved_memory.release([(node.pk, 4 * GB, now)])
    assert column(node) == 6 * GB
    reserved_memory.release([(node.pk, 6 * GB, now)])
    reserved_memory.release([(node.pk, 6 * GB, now)])
    with django_assert_num_queries(0):
        reserved_memory.release([(node.pk, 0, now)])
    assert column(node) == 0
    assert api.node(node.pk).updated_at == node.updated_at


@pytest.mark.django_db
@pytest.mark.rule("R1.52", "R1.53")
def test_a_release_takes_nothing_of_what_others_reserved_after_a_reading() -> None:
    """The reading has cleared the column; what is in it now is somebody else's."""
    node, now = hot.node(available_vram=16 * GB), clock.now()
    BackendNode.objects.filter(pk=node.pk).update(
        reserved_vram=5 * GB, reserved_cleared_at=now + timedelta(seconds=1)
    )
    reserved_memory.release([(node.pk, 5 * GB, now)])
    assert column(node) == 5 * GB


async def read(database: Any, node: BackendNode, available: int, at: datetime | None = None) -> None:
    at = at or clock.now()
    said = heartbeats.Beat(node.pk, node.fingerprint, at, available_vram=available)
    assert set((await heartbeats.record(database, [said])).values()) == {None}


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.52", "R1.53")
async def test_a_load_releases_its_bytes_if_the_reading_since_was_too_old_to_clear_them(
    database: Pool,
) -> None:
    """The reading is between two reservations: it clears neither, so each load subtracts its own bytes."""
    node, now = await sync_to_async(hot.node)(available_vram=16 * GB, fingerprint="f" * 64), clock.now()
    first, second = now - timedelta(seconds=1), now + timedelta(seconds=1)
    for amount, at in ((4 * GB, first), (5 * GB, second)):
        assert await sync_to_async(reserved_memory.reserve)(node.pk, amount, now=at)
    await read(database, node, 16 * GB, now)
    assert await sync_to_async(column)(node) == 9 * GB
    await sync_to_async(reserved_memory.release)([(node.pk, 4 * GB, first)])
    assert await sync_to_async(column)(node) == 5 * GB
    await sync_to_async(reserved_memory.release)([(node.pk, 5 * GB, second)])
    assert await sync_to_async(column)(node) == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.33", "R1.53", "R2.43", "T-REG-84")
@pytest.mark.parametrize("allocated", [0, 2, 4], ids=["nothing", "half", "all"])
async def test_a_beat_clears_the_column_and_not_what_a_load_still_needs(
    database: Pool, allocated: int
) -> None:
    """Whatever the engine has allocated when it comes; after the load has been published nothing is held."""
    node = await sync_to_async(api.make_node)(available_vram=16 * GB, total_vram=16 * GB)
    slot = await sync_to_async(begun)(node, "m", 4 * GB)
    assert slot is not None
    assert await sync_to_async(column)(node) == 4 * GB
    assert await sync_to_async(free)(node) == 12 * GB
    await read(database, node, (16 - allocated) * GB)
    assert await sync_to_async(column)(node) == 0
    assert await sync_to_async(free)(node) == 12 * GB
    await sync_to_async(published)(slot, "m:1")
    assert await sync_to_async(free)(node) == 12 * GB
    await read(database, node, 12 * GB)
    assert await sync_to_async(free)(node) == 12 * GB
    await sync_to_async(NodeModel.objects.all().delete)()
    assert await sync_to_async(free)(node) == 12 * GB, "its engine may live on until a reading says otherwise"


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.33", "R2.43")
async def test_a_batch_leaves_a_reservation_that_is_newer_than_its_beat(database: Pool) -> None:
    """Column and load both stay; the next reading clears the column alone."""
    node = await sync_to_async(api.make_node)(available_vram=16 * GB, total_vram=16 * GB)
    before = clock.now()
    await sync_to_async(begun)(node, "m", 4 * GB)
    await read(database, node, 16 * GB, before)
    assert await sync_to_async(column)(node) == 4 * GB
    assert await sync_to_async(free)(node) == 12 * GB
    await read(database, node, 16 * GB)
    assert await sync_to_async(column)(node) == 0
    assert await sync_to_async(free)(node) == 12 * GB


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.51", "R2.43")
async def test_two_loads_on_one_node(database: Pool) -> None:
    """What the first has allocated is not the second's, also after the first has been published."""
    node = await sync_to_async(api.make_node)(
        available_vram=16 * GB, total_vram=16 * GB, max_replicas_per_model=4
    )
    one = await sync_to_async(begun)(node, "one", 4 * GB)
    await sync_to_async(begun)(node, "two", 6 * GB)
    assert one is not None
    await read(database, node, 12 * GB)
    assert await sync_to_async(free)(node) == 6 * GB
    await sync_to_async(published)(one, "one:1")
    await read(database, node, 12 * GB)
    assert await sync_to_async(free)(node) == 6 * GB
    assert await sync_to_async(begun)(node, "three", 7 * GB, required=True) is None
    assert await sync_to_async(begun)(node, "three", 6 * GB, required=True) is not None
    assert await sync_to_async(free)(node) == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R2.43")
@pytest.mark.parametrize("end", ["given up", "killed", "drained"])
def test_every_end_without_a_replica_gives_back_what_was_reserved(end: str) -> None:
    """R2.43, "Port:": at once, and for the next load too; what a node still holds for others stays."""
    node = hot.node(available_vram=16 * GB)
    other = begun(node, "other", 2 * GB)
    slot = begun(node, "m", 4 * GB)
    assert slot is not None
    assert other is not None
    if end == "given up":
        slots.end_attempt(slot, attempt=attempt("m:1"), now=clock.now())
        slots.end_attempt(slot, attempt=attempt("m:1"), now=clock.now())
    elif end == "killed":
        slots.end_abandoned_loads("m", now=clock.now())
    else:
        NodeModel.objects.filter(model_name="m").delete()
        reserved_memory.release([(node.pk, 4 * GB, clock.now())])
    assert (column(node), free(node)) == (2 * GB, 14 * GB)


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.52", "R2.43")
@pytest.mark.parametrize("registered", [False, True])
def test_a_node_that_never_reports_free_memory_gets_it_back_when_a_replica_ends(registered: bool) -> None:
    """Intel's drivers do not report it: a model that was loaded and unloaded left its bytes reserved."""
    node = hot.node(
        available_vram=16 * GB, total_vram=16 * GB, vram_read_at=clock.now() if registered else None
    )
    for model in ("first", "second"):
        slot = begun(node, model, 10 * GB, required=True)
        assert slot is not None
        published(slot, f"{model}:1")
        assert (column(node), free(node)) == (10 * GB, 6 * GB)
        NodeModel.objects.update(**columns("unloading"))
        assert engines.confirm_end(slot.id, stop_sent=clock.now())
        assert (column(node), free(node)) == (0, 16 * GB)


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.33", "R1.52", "R1.53")
async def test_the_end_of_a_replica_gives_nothing_back_that_a_reading_has_cleared(database: Pool) -> None:
    """What is reserved then belongs to a later load; the stopped engine's memory is credited once."""
    node = await sync_to_async(api.make_node)(available_vram=16 * GB, total_vram=16 * GB)
    slot = await sync_to_async(begun)(node, "m", 4 * GB)
    assert slot is not None
    await sync_to_async(published)(slot, "m:1")
    stop_sent = clock.now() + timedelta(seconds=5)
    await read(database, node, 12 * GB)
    await sync_to_async(begun)(node, "other", 4 * GB)
    await sync_to_async(NodeModel.objects.filter(pk=slot.id).update)(**columns("unloading"))
    assert await sync_to_async(engines.confirm_end)(slot.id, stop_sent=stop_sent)
    assert await sync_to_async(column)(node) == 4 * GB
    assert await sync_to_async(free)(node) == 12 * GB


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.51")
async def test_a_reading_from_about_the_time_of_a_publication_may_lack_the_engines_memory(
    database: Pool,
) -> None:
    """A web process dates the reading, a controller the publication: their clocks may differ by a second."""
    node = await sync_to_async(api.make_node)(available_vram=16 * GB, total_vram=16 * GB)
    slot = await sync_to_async(begun)(node, "m", 10 * GB)
    assert slot is not None
    await sync_to_async(published)(slot, "m:1")
    loaded_at = (await NodeModel.objects.aget()).loaded_at
    assert loaded_at is not None
    for seconds, available, expected in ((0.5, 16, 6), (0.8, 6, 6), (1.0, 7, 7)):
        await read(database, node, available * GB, loaded_at + timedelta(seconds=seconds))
        assert await sync_to_async(free)(node) == expected * GB


@pytest.mark.django_db
@pytest.mark.rule("R2.43", "R2.32")
def test_a_load_goes_on_without_the_memory_unless_it_is_required(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, if there is a GPU at all; the column stays, and the load's row counts all the same."""
    assert begun(hot.node("cpu"), "m", 20 * GB) is not None
    assert not caplog.text
    NodeModel.objects.all().delete()
    node = hot.node(available_vram=16 * GB, total_vram=16 * GB)
    assert begun(node, "m", 20 * GB, required=True) is None
    assert not NodeModel.objects.exists()
    assert begun(node, "m", 20 * GB) is not None
    assert "too little free VRAM" in caplog.text
    assert (column(node), free(node)) == (0, -4 * GB)
    assert begun(node, "unknown", 0, required=True) is not None


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.52", "R2.43")
def test_a_load_that_reserved_nothing_on_the_node_takes_nothing_back() -> None:
    """It went on without the memory; what another load reserved stays when it fails."""
    node = hot.node(available_vram=16 * GB)
    assert begun(node, "m", 12 * GB) is not None
    slot = begun(node, "large", 10 * GB)
    assert slot is not None
    assert free(node) == -6 * GB
    slots.end_attempt(slot, attempt=attempt("large:1"), now=clock.now())
    assert (column(node), free(node)) == (12 * GB, 4 * GB)


@pytest.mark.django_db
@pytest.mark.rule("R1.51")
def test_the_fleet_is_four_queries(django_assert_num_queries: Queries) -> None:
    for number in range(5):
        node = hot.node(f"n{number}", available_vram=16 * GB)
        begun(node, "m", 2 * GB)
    with django_assert_num_queries(4):
        assert [one.free_vram for one in fleet_cache.read_fleet("m")] == [14 * GB] * 5


RACERS, NODES, EACH, SIZE = 32, 8, 5, 16


def placed(number: int) -> Slot | Reason:
    """One racer: looks, chooses, takes, and looks again when somebody was faster."""
    need = Need(vram=EACH * GB, vram_required=True)
    while True:
        decision = choose_node(fleet_cache.read_fleet(f"m{number}"), need=need)
        if decision.node is None:
            assert set(decision.refused.values()) == {Reason.MEMORY}
            return Reason.MEMORY
        slot = slots.reserve(
            decision.node,
            f"m{number}",
            attempt=attempt(f"{number}:1"),
            backend="b",
            now=clock.now(),
            need=need,
        )
        if isinstance(slot, Slot):
            return slot


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.51", "R1.52", "R2.43")
def test_thirty_two_loads_race_for_eight_nodes() -> None:
    """Nothing is given away twice, nobody is refused while there is room, and no release is lost.

    A reading comes while they race: it clears the column, not what they have reserved.
    """
    nodes = [
        hot.node(f"n{number}", available_vram=SIZE * GB, fingerprint=f"{number:064x}")
        for number in range(NODES)
    ]

    async def readings() -> None:
        pool = Pool(hot.database_url())
        await pool.open()
        now = clock.now()
        said = [heartbeats.Beat(n.pk, n.fingerprint, now, available_vram=SIZE * GB) for n in nodes]
        for _ in range(3):
            await heartbeats.record(pool, said)
        await pool.close()

    jobs = [lambda number=number: placed(number) for number in range(RACERS)]
    results = at_once(*jobs, lambda: asyncio.run(readings()))
    assert unexpected(results) == []
    won = [result for result in results[:RACERS] if isinstance(result, Slot)]
    there = SIZE // EACH
    assert sorted(len([s for s in won if s.node_id == n.pk]) for n in nodes) == [there] * NODES
    assert results[:RACERS].count(Reason.MEMORY) == RACERS - there * NODES
    assert all(one.free_vram == (SIZE - there * EACH) * GB for one in fleet_cache.read_fleet("any"))

    marks = {row.pk: owner_of(row) for row in NodeModel.objects.all()}
    ends = [
        lambda slot=slot: slots.end_attempt(slot, attempt=marks[slot.id], now=clock.now()) for slot in won
    ]
    assert unexpected(at_once(*ends)) == []
    assert all(one.free_vram == SIZE * GB for one in fleet_cache.read_fleet("any"))
    assert set(BackendNode.objects.values_list("reserved_vram", flat=True)) == {0}


def feasible(
    model: str = "any", need: Need = NO_NEED, only: Collection[UUID] | None = None, queries: int = 4
) -> list[str]:
    """The nodes that a load of the model could take, in the order in which they are tried."""
    with CaptureQueriesContext(connection) as context:
        decision = choose_node(fleet_cache.read_fleet(model, allowed_nodes=only), need=need)
    assert len(context) == queries
    return [node.name for node in decision.ranked]


@pytest.mark.django_db
@pytest.mark.rule("R1.70", "R1.74", "T-REG-13", "T-REG-14", "T-REG-87")
def test_nodes_with_enough_memory() -> None:
    small, large = hot.node("small", available_vram=4 * GB), hot.node("large", available_vram=16 * GB)
    busy = hot.node("busy", available_vram=30 * GB)
    hot.replica(busy)
    eight, forty = (Need(vram=count * GB, vram_required=True) for count in (8, 40))
    assert feasible(need=eight) == ["large", "busy"]
    assert feasible(need=eight, only=[small.pk, busy.pk]) == ["busy"]
    assert not feasible(need=eight, only=[small.pk])
    assert not feasible(need=forty)
    BackendNode.objects.filter(pk=large.pk).update(reserved_vram=10 * GB)
    assert feasible(need=eight) == ["busy"]


@pytest.mark.django_db
@pytest.mark.rule(*("R1.71", "R1.74", "T-REG-15", "T-REG-16", "T-REG-163", "T-REG-164", "T-REG-165"))
def test_idle_nodes_come_first() -> None:
    """Reservations do not count; a replica that still loads makes no node busy."""
    first = hot.node("first", available_vram=9, reserved_vram=8)
    second, third = hot.node("second", available_vram=5), hot.node("third", available_vram=99)
    hot.replica(second, state="loading", address="")
    hot.replica(third)
    assert feasible() == ["first", "second", "third"]
    assert feasible(only=[second.pk, third.pk]) == ["second", "third"]
    hot.replica(first)
    hot.replica(second, "other")
    assert feasible() == ["third", "first", "second"], "none is idle: the most memory"


@pytest.mark.django_db
@pytest.mark.rule("R1.72", "R1.73", "R1.74", "T-REG-17")
def test_among_busy_nodes_the_least_loaded_comes_first() -> None:
    """All rows of a node count (R1.73 [S]), memory decides between equals."""
    one, three = hot.node("one"), hot.node("three", available_vram=99)
    same = hot.node("same", available_vram=5)
    hot.replica(one, in_flight=1)
    hot.replica(three, in_flight=1)
    hot.replica(three, index=1, in_flight=2, state="unloading")
    hot.replica(same, in_flight=1)
    assert feasible() == ["same", "one", "three"]
    assert feasible(only=[one.pk, three.pk]) == ["one", "three"]


@pytest.mark.django_db
@pytest.mark.rule("R1.68", "R1.64", "R1.70", "R1.71", "R1.72", "R1.75", "R1.76")
def test_only_healthy_backend_nodes_are_found() -> None:
    for name, fields in (
        ("pending", {"approved_at": None}),
        ("sick", {"unhealthy_at": clock.now()}),
        ("leaving", {"drained_at": clock.now()}),
        ("agent", {"node_type": "agent"}),
    ):
        hot.replica(hot.node(name, available_vram=9, **fields), "m")
    assert not feasible("x")
    assert not unload_requests.least_recently_used(list(BackendNode.objects.values_list("pk", flat=True)))
    assert {row.node.name for row in NodeModel.objects.serving()} <= {"agent"}
    assert NodeModel.objects.of("m").loaded().count() == 4, "R1.66"


@pytest.mark.django_db
@pytest.mark.rule("R1.64", "R1.66", "R1.62", "T-REG-55", "T-REG-56", "T-REG-67")
def test_slots_and_capacity() -> None:
    """Every row takes a slot, one in `loading` or `unloading` too; only loaded ones count as replicas."""
    wide, full = hot.node("wide", max_replicas_per_model=4), hot.node("full", max_replicas_per_model=1)
    hot.node("empty", max_replicas_per_model=2)
    over = hot.node("over", max_replicas_per_model=1)
    hot.replica(wide, "m")
    hot.replica(wide, "m", index=1, state="loading", address="")
    hot.replica(wide, "other")
    hot.replica(full, "m", state="unloading")
    hot.replica(over, "m")
    hot.replica(over, "m", index=1)
    assert feasible("m") == ["empty", "wide"]
    assert feasible("m", only=[wide.pk, full.pk]) == ["wide"]
    taken = {node.name: len(node.used_indices) for node in fleet_cache.read_fleet("m")}
    assert taken == {"wide": 2, "full": 1, "empty": 0, "over": 2}
    assert NodeModel.objects.of("m").loaded().count() == 3


@pytest.mark.django_db
@pytest.mark.rule(*("R1.76", "T-REG-147", "T-REG-148", "T-REG-150", "T-REG-159", "T-REG-160", "T-REG-161"))
def test_nodes_with_a_model() -> None:
    """R1.76, "Port:": a node with two replicas counts once."""
    two, one = hot.node("two"), hot.node("one")
    hot.replica(two, "m", in_flight=3, backend_type="b")
    least = hot.replica(two, "m", index=1, in_flight=1, backend_type="b")
    last = hot.replica(one, "m", in_flight=2, backend_type="b")
    nodes = [one.pk, two.pk]
    assert drains.last_replicas("b", nodes) == {}, "two nodes serve it"
    assert load_explanation._find_next_pick("m") == str(least.pk), "the node with the fewest requests on one"
    assert not fleet_queries.is_served("nothing")
    BackendNode.objects.filter(pk=two.pk).update(unhealthy_at=clock.now())
    assert drains.last_replicas("b", nodes) == {one.pk: {"m"}}
    assert fleet_queries.is_served("m")
    last.delete()
    assert not fleet_queries.is_served("m")


@pytest.mark.django_db
@pytest.mark.rule("R1.75", "T-REG-151")
def test_the_least_recently_used_replica(django_assert_num_queries: Queries) -> None:
    """Of one node or of several; one with a request, or one that does not serve, is not found."""
    here, there = hot.node("here"), hot.node("there")
    hot.replica(here, "busy", in_flight=1, last_used=hot.EPOCH - timedelta(days=2))
    hot.replica(here, "leaving", state="unloading", last_used=hot.EPOCH - timedelta(days=2))
    newer = hot.replica(here, "newer", last_used=hot.EPOCH)
    older = hot.replica(here, "older", last_used=hot.EPOCH - timedelta(hours=1))
    oldest = hot.replica(there, "oldest", last_used=hot.EPOCH - timedelta(days=1))
    with django_assert_num_queries(1):
        assert list(unload_requests.least_recently_used([here.pk, there.pk])) == [oldest, older, newer]
    assert unload_requests.least_recently_used([here.pk]).first() == older


ROWS = st.tuples(st.sampled_from(["loaded", "unloading", "loading"]), st.integers(0, 2))
NODE = st.tuples(st.integers(0, 4), st.integers(0, 2), st.lists(ROWS, max_size=2))
"""Available and reserved memory in GB; state and requests of replicas."""
FLEET = st.lists(NODE, min_size=1, max_size=5)


@pytest.mark.django_db
@settings(
    max_examples=25 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fleet=FLEET, least=st.integers(1, 5))
def test_the_order_of_the_choice_on_rows(
    db: None, fleet: list[tuple[int, int, list[tuple[str, int]]]], least: int
) -> None:
    """R1.70 to R1.72: the choice by the rows is the order that the rules state."""
    forget_nodes()
    for number, (available, reserved, replicas) in enumerate(fleet):
        node = hot.node(f"n{number}", available_vram=available * GB, reserved_vram=reserved * GB)
        for index, (state, requests) in enumerate(replicas):
            hot.replica(node, index=index, state=state, in_flight=requests)
    nodes = []
    for number, (available, reserved, replicas) in enumerate(fleet):
        busy, requests = "loaded" in dict(replicas), sum(count for _, count in replicas)
        nodes.append((f"n{number}", busy, requests if busy else 0, available, available - reserved))
    by_free = sorted(nodes, key=lambda node: (*node[1:3], -node[4], node[0]))
    by_available = sorted(nodes, key=lambda node: (*node[1:3], -node[3], node[0]))
    need = Need(vram=least * GB, vram_required=True)
    assert feasible("another", need) == [node[0] for node in by_free if node[4] >= least]
    assert feasible("another") == [node[0] for node in by_available]


def _ids(ranked: Collection[Any]) -> list[UUID]:
    return [node.id for node in ranked]
