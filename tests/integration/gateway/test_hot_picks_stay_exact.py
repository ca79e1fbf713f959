"""Counts of picks and releases stay exact: at once, in several processes, after cuts, cancels and deaths."""

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction
from psycopg import sql
from psycopg.conninfo import make_conninfo

from localai_cluster.kit import clock, database_pool, processes
from localai_cluster.kit.errors import ClusterError, Unavailable
from nodes.gateway.picks import Picker, ProcessHeartbeat
from nodes.gateway.request import InferenceRequest, Replica
from nodes.models import NodeModel, ReplicaUse
from nodes.reconcilers import liveness
from nodes.replicas import engines, hooks
from nodes.replicas.hooks import RemovedReplica
from tests.conftest import until
from tests.support import hot
from tests.support.picks import acquire
from tests.support.races import waiting

pytestmark = pytest.mark.django_db(transaction=True)


async def flushed(picker: Picker) -> None:
    """Returns when what was given back has reached the database."""
    await until(lambda: nothing_waits(picker))


async def nothing_waits(picker: Picker) -> bool:
    await picker.wait_until_idle()
    return not picker._released


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
            heartbeat = ProcessHeartbeat(picker, silence_limit=15)
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
    announced: list[RemovedReplica] = []
    monkeypatch.setattr(hooks, "on_removed", [announced.append])

    async def scenario() -> tuple[bool, bool]:
        async with hot.picker() as picker:
            replica = await acquire(picker)
            stale = replace(replica, address="127.0.0.1:9")
            kept, gone = await picker.exclude(stale), await picker.exclude(replica)
            picker.release(replica)
            await picker.settle()
            return kept, gone

    assert asyncio.run(scenario()) == (False, True)
    assert announced == []
    row.refresh_from_db()
    assert (row.state, row.reason, row.in_flight) == ("unloading", "lost", 0)
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

            await asyncio.gather(busy(), busy(), one.exclude(dead), busy())
            one.release(dead)
            await asyncio.gather(one.settle(), two.settle())

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [0, 0]
    assert sorted(NodeModel.objects.values_list("state", flat=True)) == ["loaded", "unloading"]


@pytest.mark.rule("C39")
def test_a_database_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs enforces no limit of its own; the request goes on over another connection."""
    hot.replica(hot.node())
    patience = database_pool.ROUND_TRIP_TIMEOUT
    monkeypatch.setattr(database_pool, "ROUND_TRIP_TIMEOUT", 0.5)

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
            # Or a busy machine gives up all others.
            monkeypatch.setattr(database_pool, "ROUND_TRIP_TIMEOUT", patience)

            async def right() -> bool:
                await picker.settle()
                await hot.in_thread(liveness.recount)
                return list((await hot.in_thread(hot.counts)).values()) == [0]

            # It carries the statement out after all, as do others that were given up on a busy machine. If
            # one of them had read the shares before a settlement and wrote after it, the count is not their
            # sum. The settlement puts the shares right, the state pass the sum.
            await until(lambda: processes.stat(backend) is None)
            await flushed(picker)
            await until(right)

    asyncio.run(scenario())


def make_read_only(value: str) -> None:
    """Change the default of new sessions, and end those that exist, as a failover to a standby would."""
    url = make_conninfo(hot.database_url(), options="-c default_transaction_read_only=off")
    with psycopg.connect(url, autocommit=True) as session:
        name = sql.Identifier(session.info.dbname)
        statement = sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
        session.execute(statement.format(name, sql.SQL(value)))


@pytest.mark.rule("C39")
def test_a_server_that_only_reads_is_as_good_as_none() -> None:
    """As a standby to which a name still leads: 503, and no connection to it is kept."""
    hot.replica(hot.node())

    async def serves(picker: Picker) -> bool:
        try:
            picker.release(await acquire(picker))
        except Unavailable:  # of a connection that was opened just before
            return False
        return True

    async def scenario() -> None:
        async with hot.picker() as picker:
            await hot.in_thread(make_read_only, "on")
            try:
                await hot.in_thread(cut_connections)
                for _ in range(2):
                    with pytest.raises(Unavailable):
                        await asyncio.wait_for(acquire(picker), 60)
            finally:
                await hot.in_thread(make_read_only, "off")
            await until(lambda: serves(picker))
            await picker.settle()

    asyncio.run(scenario())
    assert list(hot.counts().values()) == [0]


def test_a_refused_statement_fails_its_requests_and_no_others() -> None:
    """Whatever the error, every request that waits gets one, and the next pick has another connection."""
    hot.replica(hot.node())

    async def scenario() -> list[Any]:
        async with hot.picker() as picker:
            await picker.connection.fetch_rows("SELECT set_config('search_path', $1, false)", ("pg_temp",))
            asked = [acquire(picker) for _ in range(3)]
            failed = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
            picker.release(await acquire(picker))
            await picker.settle()
            return failed

    assert [type(error) for error in asyncio.run(scenario())] == [ClusterError] * 3
    assert list(hot.counts().values()) == [0]


@pytest.mark.rule("R1.58")
def test_a_release_that_waits_for_a_departure_counts_nothing() -> None:
    """The departure has taken the counts of all requests away, also of those that still run."""
    on = hot.node()
    hot.replica(on)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with hot.picker() as picker:
            taken = [await acquire(picker) for _ in range(3)]

            def leave() -> None:
                with transaction.atomic():
                    engines.depart(on.pk, now=clock.now())
                    loop.call_soon_threadsafe(picker.release, taken[0])
                    waiting()
                closed()

            await asyncio.to_thread(leave)
            await flushed(picker)

    asyncio.run(scenario())
    assert not ReplicaUse.objects.exclude(count=0).exists()
    assert liveness.recount() == 0


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
            answer = picker._complete_pick

            def answer_and_leave(*values: Any) -> None:
                answer(*values)
                asking.cancel()

            vars(picker)["_complete_pick"] = answer_and_leave
            with pytest.raises(asyncio.CancelledError):
                await asking
            held = picker.in_flight()
            await picker.settle()
            return held

    assert asyncio.run(scenario()) == 0
    assert list(hot.counts().values()) == [0]
