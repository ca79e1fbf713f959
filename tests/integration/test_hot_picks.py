"""Picks and releases against a real PostgreSQL: exact counts, also when all happens at once."""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster import clock, procs
from localai_cluster.accounts import credentials
from localai_cluster.accounts.credentials import StoredKey, WrongKey
from localai_cluster.accounts.principals import ANONYMOUS
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel, ReplicaUse
from nodes.reconcilers import liveness
from nodes.replicas import hooks, leaving, snapshot, statements
from nodes.replicas.hooks import Removed
from nodes.routing import pool, process
from nodes.routing.picks import Picker
from nodes.routing.request import InferenceRequest, Replica
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.policy import Candidate, spread

pytestmark = pytest.mark.django_db(transaction=True)


async def flushed(picker: Picker) -> None:
    """Returns when what was given back has reached the database."""
    assert await clock.wait_until(lambda: nothing_waits(picker), timeout=30, every=0.002)


async def nothing_waits(picker: Picker) -> bool:
    await picker.idle()
    return not picker._released


async def acquire(picker: Picker, model: str = "echo") -> Replica:
    replica = await picker.acquire(InferenceRequest(model=model))
    assert replica is not None
    return replica


def orm_twin(model: str, now: datetime) -> NodeModel:
    """One pick through the ORM, in the words of R1.78 and R1.79; the caller's transaction holds the lock."""
    row = (
        NodeModel.objects.serving()
        .of(model)
        .select_for_update(of=("self",))
        .order_by("in_flight", "last_used", "-node__available_vram", "id")[0]
    )
    NodeModel.objects.filter(pk=row.pk).update(in_flight=row.in_flight + 1, last_used=now)
    return row


@pytest.mark.rule("R1.78")
def test_fifty_at_once_over_three_replicas() -> None:
    """R1.78, R1.79: fifty simultaneous picks are spread exactly, by few statements, and all come back."""
    on = hot.node()
    for index in range(3):
        hot.replica(on, index=index, in_flight=0)

    async def scenario() -> tuple[Counter[str], int]:
        async with hot.picker() as picker:
            taken = await asyncio.gather(*(acquire(picker) for _ in range(50)))
            seen = Counter(replica.address for replica in taken)
            for replica in taken:
                picker.release(replica)
            await picker.settle()
            return seen, picker.connection.executed

    seen, executed = asyncio.run(scenario())
    assert sorted(seen.values()) == [16, 17, 17]
    assert executed <= 4, "fifty requests shared their statements"
    assert set(hot.counts().values()) == {0}
    assert not ReplicaUse.objects.exclude(count=0).exists()


@pytest.mark.rule("T-REG-158")
def test_one_request_costs_two_statements() -> None:
    """The hot path: one statement in, one out, with an API key from the database too."""
    hot.replica(hot.node())
    hot.api_key("h1")

    async def scenario() -> int:
        async with hot.picker() as picker:
            for _ in range(5):
                request = InferenceRequest(model="echo", key_hash="h1")
                replica = await picker.acquire(request)
                assert replica is not None
                assert (request.principal.name, request.key_hash) == ("someone", "")
                picker.release(replica)
                await flushed(picker)
            return picker.connection.executed

    assert asyncio.run(scenario()) == 10


def test_only_loaded_replicas_on_healthy_backend_nodes() -> None:
    """R1.79: neither loading rows nor pending, draining, offline or agent nodes are picked."""
    now = clock.now()
    hot.replica(hot.node("pending", approved_at=None))
    hot.replica(hot.node("drained", drained_at=now))
    hot.replica(hot.node("offline", offline_at=now))
    hot.replica(hot.node("agent", node_type="agent"))
    good = hot.node("good")
    hot.replica(good, index=0, state="loading")
    hot.replica(good, model="other", index=1)

    async def scenario() -> Replica | None:
        async with hot.picker() as picker:
            return await picker.acquire(InferenceRequest(model="echo"))

    assert asyncio.run(scenario()) is None


def test_only_valid_keys_are_served_and_counted() -> None:
    """A pick for an unknown, revoked or sleeping user's key counts nothing and is refused."""
    hot.replica(hot.node())
    hot.api_key("good", "a")
    hot.api_key("revoked", "b", revoked_at=clock.now())
    hot.api_key("asleep", "c", active=False)
    keys = ("good", "revoked", "asleep", "unknown", "good")
    requests = [InferenceRequest(model="echo", key_hash=key) for key in keys]
    without_model = InferenceRequest(key_hash="good")

    async def scenario() -> list[Any]:
        async with hot.picker() as picker:
            asked = [picker.acquire(request) for request in (*requests, without_model)]
            return await asyncio.gather(*asked, return_exceptions=True)

    good, *bad, again, nothing = asyncio.run(scenario())
    assert good == again == requests[0].replica
    assert nothing is None
    assert [type(error) for error in bad] == [WrongKey] * 3
    assert {request.principal.name for request in (requests[0], requests[4], without_model)} == {"a"}
    assert {request.principal for request in requests[1:4]} == {ANONYMOUS}
    assert hot.counts() == {"127.0.0.1:50000": 2}


def test_rest_and_the_hot_path_agree_on_every_stored_key() -> None:
    """One rule says which keys are valid and whose they are, by ORM and by the hot path's statement."""
    hot.api_key("user", "a")
    hot.api_key("staff", "b")
    hot.api_key("superuser", "c")
    hot.api_key("revoked", "d", revoked_at=clock.now())
    hot.api_key("asleep", "e", active=False)
    User.objects.filter(username="b").update(is_staff=True)
    User.objects.filter(username="c").update(is_superuser=True)
    requests = {
        key: InferenceRequest(key_hash=key) for key in ("user", "staff", "superuser", "revoked", "asleep")
    }

    async def scenario() -> None:
        async with hot.picker() as picker:
            asked = [picker.acquire(request) for request in requests.values()]
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(scenario())
    by_orm = {key: credentials.principal_of(StoredKey(key)) for key in requests}
    assert {key: request.principal for key, request in requests.items()} == by_orm
    assert [who.kind for who in by_orm.values()] == ["user", "admin", "admin", "anonymous", "anonymous"]


@pytest.mark.rule("R1.82", "R2.70")
def test_two_processes_stay_exact() -> None:
    """R1.82 (Port), R2.70: two processes with their own connections, 400 requests each, never lose a
    count."""
    on = hot.node()
    for index in range(3):
        hot.replica(on, index=index)

    async def client(picker: Picker, requests: int) -> None:
        for _ in range(requests):
            replica = await acquire(picker)
            await asyncio.sleep(0)
            picker.release(replica)

    async def scenario() -> tuple[list[Replica], list[Replica]]:
        async with hot.picker() as one, hot.picker() as two:
            await asyncio.gather(*(client(picker, 20) for picker in (one, two) for _ in range(20)))
            left = [await acquire(one) for _ in range(4)], [await acquire(two) for _ in range(3)]
            await asyncio.gather(one.settle(), two.settle())
            return left

    one, two = asyncio.run(scenario())
    expected = Counter(replica.id for replica in (*one, *two))
    assert {row.pk: row.in_flight for row in NodeModel.objects.all()} == {
        row.pk: expected[row.pk] for row in NodeModel.objects.all()
    }
    assert sum(use.count for use in ReplicaUse.objects.all()) == 7


def test_a_process_taken_for_dead_cannot_subtract_twice() -> None:
    """R5 (Port): the liveness pass took the counts back; what the process releases later changes nothing, and
    after it has announced itself again the counts are what it really carries."""
    hot.replica(hot.node())

    async def scenario() -> None:
        async with hot.picker() as dead, hot.picker() as alive:
            first, _, _ = [await acquire(dead) for _ in range(3)]
            await acquire(alive)
            await asyncio.to_thread(check, 4)
            await asyncio.to_thread(forget, dead)
            await asyncio.to_thread(check, 1)
            dead.release(first)
            await flushed(dead)
            await asyncio.to_thread(check, 1)
            assert not await dead.renew()
            await dead.settle()
            await asyncio.to_thread(check, 3)
            assert await dead.renew()

    def forget(picker: Picker) -> None:
        declare_dead(picker)
        declare_dead(picker)

    def check(expected: int) -> None:
        assert list(hot.counts().values()) == [expected]
        closed()

    asyncio.run(scenario())


def test_a_pick_after_being_taken_for_dead_announces_the_process() -> None:
    """A pick that finds its process's row gone repeats itself after an announcement, and counts
    everything."""
    hot.replica(hot.node())

    async def scenario() -> None:
        async with hot.picker() as picker:
            await asyncio.to_thread(removed, picker)
            await acquire(picker)
            await acquire(picker)

    def removed(picker: Picker) -> None:
        declare_dead(picker)

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [2]
    assert hot.processes() == 1


def test_lost_connections_lose_no_count() -> None:
    """A server that drops every connection costs a settlement, never a count."""
    hot.replica(hot.node())

    async def scenario() -> None:
        async with hot.picker() as picker:
            held = [await acquire(picker) for _ in range(3)]
            await asyncio.to_thread(cut_connections)
            picker.release(held.pop())
            await acquire(picker)
            await asyncio.to_thread(cut_connections)
            picker.release(held.pop())
            await picker.settle()
            assert picker.in_flight() == 2

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [2]


def test_clean_stop_gives_everything_back() -> None:
    """A process that signs off leaves neither a count nor a row."""
    hot.replica(hot.node())

    async def scenario() -> None:
        async with hot.picker() as picker:
            heartbeat = process.ProcessHeartbeat(picker, silence_limit=15)
            await heartbeat.start()
            await asyncio.gather(*(acquire(picker) for _ in range(5)))
            await heartbeat.stop()

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [0]
    assert hot.processes() == 0


@pytest.mark.rule("R2.73", "C39")
def test_a_cancelled_caller_leaves_no_count() -> None:
    """R2.73: a request that is cancelled while its pick is under way gives the replica back."""
    hot.replica(hot.node())

    async def scenario() -> None:
        async with hot.picker() as picker:
            tasks = [asyncio.create_task(acquire(picker)) for _ in range(10)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(result, Replica) for result in results) == 5
            await picker.settle()
            assert picker.in_flight() == 5

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [5]


def test_removal_is_by_id_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead replica leaves the picks, its row and counts stay; one loaded again elsewhere serves on."""
    row = hot.replica(hot.node())
    announced: list[Removed] = []
    monkeypatch.setattr(hooks, "on_removed", [announced.append])

    async def scenario() -> tuple[bool, bool]:
        async with hot.picker() as picker:
            replica = await acquire(picker)
            stale = replace(replica, address="127.0.0.1:9")
            kept, gone = await picker.lose(stale), await picker.lose(replica)
            picker.release(replica)
            await picker.settle()
            return kept, gone

    assert asyncio.run(scenario()) == (False, True)
    assert announced == []
    row.refresh_from_db()
    assert (row.state, row.loading_by, row.in_flight) == ("unloading", leaving.LOST, 0)
    assert [use.count for use in ReplicaUse.objects.all()] == [0]


def test_removal_races_with_picks() -> None:
    """Removing a replica while others are being picked from it breaks neither side."""
    on = hot.node()
    hot.replica(on, index=0)
    hot.replica(on, index=1)

    async def scenario() -> None:
        async with hot.picker() as one, hot.picker() as two:
            dead = await acquire(one)

            async def busy() -> None:
                for _ in range(50):
                    two.release(await acquire(two))

            await asyncio.gather(busy(), busy(), one.lose(dead), busy())
            one.release(dead)
            await asyncio.gather(one.settle(), two.settle())

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [0, 0]
    assert sorted(NodeModel.objects.values_list("state", flat=True)) == ["loaded", "unloading"]


FACTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)),
    min_size=0,
    max_size=5,
)


@pytest.fixture
def raw() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(hot.database_url()) as connection:
        yield connection


@pytest.mark.rule("R1.78")
@settings(max_examples=40 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(facts=FACTS, requests=st.integers(0, 12))
def test_statement_and_pure_twin_agree(
    raw: psycopg.Connection[Any], facts: list[tuple[int, int, int]], requests: int
) -> None:
    """R1.78: the SQL spreads exactly as the pure function does, on the same data."""
    now = clock.now()
    candidates = [
        Candidate(uuid4(), in_flight, now - timedelta(seconds=idle), vram) for in_flight, idle, vram in facts
    ]
    try:
        for number, candidate in enumerate(candidates):
            insert(raw, number, candidate, now)
        owner = uuid4()
        raw.execute(statements.ANNOUNCE, about(owner, now))
        rows = psycopg.RawCursor(raw).execute(statements.EXCHANGE, wanted(owner, requests, now)).fetchall()
    finally:
        raw.rollback()
    assert {row[0]: row[4] for row in rows} == dict(spread(candidates, requests, now))


@pytest.mark.parametrize("requests", [1, 30])
def test_more_replicas_than_are_locked(raw: psycopg.Connection[Any], requests: int) -> None:
    """R1.78: the choice is among all of them, also by what the same statement counts out."""
    now, chance, owner = clock.now(), random.Random(1), uuid4()
    candidates = [
        Candidate(uuid4(), chance.randrange(1, 4), now - timedelta(seconds=chance.randrange(90)), 0)
        for _ in range(statements.SPARE + 30)
    ]
    released = sorted(candidates, key=lambda one: one.in_flight)[-5:]
    try:
        for number, candidate in enumerate(candidates):
            insert(raw, number, candidate, now)
        raw.execute(statements.ANNOUNCE, about(owner, now))
        for one in released:
            raw.execute(HOLD, (owner, one.id, one.in_flight))
        values = str(owner), now.isoformat(), json.dumps(exchanged(released, requests))
        rows = psycopg.RawCursor(raw).execute(statements.EXCHANGE, values).fetchall()
    finally:
        raw.rollback()
    after = [replace(one, in_flight=0) if one in released else one for one in candidates]
    assert {row[0]: row[4] for row in rows} == dict(spread(after, requests, now))


@pytest.mark.rule("R1.78", "T-REG-24")
def test_orm_twin_agrees() -> None:
    """R1.78, R1.79: picks by the statement and picks through the ORM choose the same rows in the same
    state."""
    for number in range(4):
        on = hot.node(f"n{number}", available_vram=number % 2)
        hot.replica(on, index=number, in_flight=number % 3, last_used=hot.EPOCH)
    now = clock.now()
    before = [
        Candidate(row.pk, row.in_flight, row.last_used, row.node.available_vram)
        for row in NodeModel.objects.select_related("node")
    ]
    with transaction.atomic():
        by_orm = Counter(orm_twin("echo", now).pk for _ in range(11))
        transaction.set_rollback(True)

    async def scenario() -> Counter[UUID]:
        async with hot.picker() as picker:
            return Counter(
                replica.id for replica in await asyncio.gather(*(acquire(picker) for _ in range(11)))
            )

    assert asyncio.run(scenario()) == by_orm == spread(before, 11, now)


@pytest.mark.rule("C39")
def test_a_database_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs enforces no limit of its own; the request goes on over another connection."""
    hot.replica(hot.node())
    monkeypatch.setattr(pool, "ANSWER_SECONDS", 0.5)

    async def scenario() -> None:
        async with hot.picker() as picker:
            picker.release(await acquire(picker))
            await flushed(picker)
            assert picker.connection._connection is not None
            backend = picker.connection._connection.info.backend_pid
            os.kill(backend, signal.SIGSTOP)
            try:
                picker.release(await asyncio.wait_for(acquire(picker), 120))
            finally:
                os.kill(backend, signal.SIGCONT)

            async def ended() -> bool:
                return procs.stat(backend) is None

            async def right() -> bool:
                await picker.settle()
                return list((await hot.in_thread(hot.counts)).values()) == [0]

            # It carries the statement out after all, as do others that were given up on a busy machine; the
            # audit of the counts puts that right.
            assert await clock.wait_until(ended, timeout=60)
            await flushed(picker)
            assert await clock.wait_until(right, timeout=60)

    asyncio.run(scenario())


def about(owner: UUID, now: datetime) -> dict[str, Any]:
    return {"process": owner, "host": "h", "pid": 1, "started": now, "now": now, "version": "1"}


HOLD = "INSERT INTO replica_uses (process_id, replica_id, count) VALUES (%s, %s, %s)"


def exchanged(released: Sequence[Candidate], requests: int) -> dict[str, Any]:
    picks = [{"ask": 0, "model": "echo", "key": "", "n": requests}] if requests else []
    return {
        "keys": [],
        "releases": [{"id": str(one.id), "n": one.in_flight} for one in released],
        "picks": picks,
    }


def wanted(owner: UUID, requests: int, now: datetime) -> tuple[str, str, str]:
    return str(owner), now.isoformat(), json.dumps(exchanged([], requests))


def insert(raw: psycopg.Connection[Any], number: int, candidate: Candidate, now: datetime) -> None:
    node = BackendNode(name=f"n{number}", name_key=f"n{number}", address="a:1", approved_at=now)
    node.available_vram = candidate.available_vram
    row = NodeModel(
        id=candidate.id, node=node, model_name="echo", address=f"a:{number}", state="loaded",
        in_flight=candidate.in_flight, last_used=candidate.last_used,
    )  # fmt: skip
    for model in (node, row):
        fields = [field for field in model._meta.local_concrete_fields if not field.generated]
        values = [field.get_db_prep_save(getattr(model, field.attname), connection) for field in fields]
        names = ", ".join(f'"{field.column}"' for field in fields)
        marks = ", ".join(["%s"] * len(fields))
        raw.execute(f"INSERT INTO {model._meta.db_table} ({names}) VALUES ({marks})", values)


def declare_dead(picker: Picker) -> None:
    """What the liveness pass does to a process that fell silent."""
    later = clock.now() + timedelta(hours=1)
    plan = liveness.Plan(nodes=[], processes=[picker.process_id])
    liveness.apply(plan, later, liveness.Limits(node=60, web=15))
    closed()


def cut_connections() -> None:
    """Ends every connection of the hot path's kind, as a restarted server would."""
    with psycopg.connect(hot.database_url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'localai-cluster-web'"
        )


def closed() -> None:
    """Closes the Django connection of this thread."""
    connection.close()


@pytest.mark.rule("R2.73")
def test_a_caller_who_leaves_in_the_very_turn_of_the_answer_is_counted_out() -> None:
    """R2.73: the answer and the cancellation may meet in one turn of the loop; nothing stays in flight."""
    hot.replica(hot.node())

    async def scenario() -> int:
        async with hot.picker() as picker:
            asking = asyncio.create_task(acquire(picker))
            answer = picker._answer

            def answer_and_leave(*values: Any) -> None:
                answer(*values)
                asking.cancel()

            vars(picker)["_answer"] = answer_and_leave
            with pytest.raises(asyncio.CancelledError):
                await asking
            held = picker.in_flight()
            await picker.settle()
            return held

    assert asyncio.run(scenario()) == 0
    assert list(hot.counts().values()) == [0]


def pick(**wish: Any) -> Replica | None:
    """What one pick of `echo` with this wish gets."""

    async def scenario() -> Replica | None:
        async with hot.picker() as picker:
            return await picker.acquire(InferenceRequest(model="echo", **wish))

    return asyncio.run(scenario())


@pytest.mark.rule("R1.79", "T-REG-21", "T-REG-23")
def test_only_candidates_are_picked() -> None:
    """A node that is no candidate gets nothing, however idle it is; without any candidate there is none."""
    calm, busy = hot.node("calm"), hot.node("busy")
    hot.replica(calm)
    wanted = hot.replica(busy, in_flight=9)
    picked = pick(candidates=frozenset({busy.pk}))
    assert picked is not None
    assert picked.id == wanted.pk
    assert pick(candidates=frozenset({hot.node("empty").pk})) is None
    assert pick(candidates=frozenset()) is None


@pytest.mark.rule("R1.80", "T-REG-25", "T-REG-26", "T-REG-27", "T-REG-28")
def test_the_preferred_replica_is_picked_however_busy_it_is() -> None:
    """Exactly that node and index; one that does not serve or is no candidate leaves the usual order."""
    one, two = hot.node("one"), hot.node("two")
    hot.replica(one, index=0)
    hot.replica(one, index=1, in_flight=9)
    hot.replica(two, index=0, in_flight=5)
    hot.replica(two, index=1, state="loading")

    def got(**wish: Any) -> tuple[UUID, int]:
        picked = pick(**wish)
        assert picked is not None
        return picked.node_id, picked.index

    assert got() == (one.pk, 0)
    assert got(preferred=(one.pk, 1)) == (one.pk, 1)
    assert got(preferred=(two.pk, 0)) == (two.pk, 0)
    assert got(preferred=(two.pk, 1)) == (one.pk, 0)
    assert got(preferred=(uuid4(), 0)) == (one.pk, 0)
    assert got(preferred=(one.pk, 1), candidates=frozenset({two.pk})) == (two.pk, 0)


@pytest.mark.rule("R2.10", "T-ROU-12", "R2.4")
def test_a_replica_outside_the_selector_gets_no_request() -> None:
    """The rule as it is stored now; a selector that cannot be read chooses no node (R1.69)."""
    east, west = hot.node("east"), hot.node("west")
    for node, zone in ((east, "east"), (west, "west")):
        NodeLabel.objects.create(node=node, key="zone", value=zone)
        NodeLabel.objects.create(node=node, key="tier", value="fast")
        hot.replica(node)
    rule = ModelSchedulingConfig.objects.create(model_name="echo")
    west_only = {"zone": "west", "tier": "fast"}
    for selector, expected in (
        ({}, {east.pk, west.pk}),
        (west_only, {west.pk}),
        ({"zone": "north"}, set()),
        (["zone"], set()),
        ({"zone": 1}, set()),
    ):
        ModelSchedulingConfig.objects.filter(pk=rule.pk).update(node_selector=selector)
        picked = [pick() for _ in range(4)]
        assert {one.node_id for one in picked if one is not None} == expected
        assert snapshot.serving("echo") == bool(expected)


def test_requests_with_different_wishes_share_a_statement() -> None:
    """Each gets its own, and all are counted, also where two wishes meet in one replica."""
    one, two = hot.node("one"), hot.node("two")
    first = hot.replica(one, in_flight=0)
    hot.replica(two, in_flight=0, index=1)
    wishes: list[dict[str, Any]] = [
        {"preferred": (one.pk, 0)},
        {"candidates": frozenset({one.pk})},
        {"candidates": frozenset({two.pk})},
        {},
    ]

    async def scenario() -> tuple[list[Replica | None], int]:
        async with hot.picker() as picker:
            before = picker.connection.executed
            asked = [picker.acquire(InferenceRequest(model="echo", **wish)) for wish in wishes for _ in "ab"]
            return await asyncio.gather(*asked), picker.connection.executed - before

    picked, executed = asyncio.run(scenario())
    nodes = [one_of.node_id for one_of in picked if one_of is not None]
    assert nodes[:6] == [one.pk] * 4 + [two.pk] * 2
    assert len(nodes) == 8
    assert executed <= 2
    assert hot.counts()[first.address] == nodes.count(one.pk)
