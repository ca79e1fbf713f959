"""Progress in batches and leases that are kept, against a real PostgreSQL."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import OperationalError, connection

from localai_cluster.kit import clock, errors
from localai_cluster.kit.leases import LeaseLost
from operations.changes import events, feed
from operations.executor.executor import Executor, LeaseKeeper, OperationQueue
from operations.executor.work import Work, in_thread
from operations.ledger import admission, attempts, progress
from operations.ledger.admission import Requester
from operations.ledger.progress import BATCH_INTERVAL, Tick, record
from operations.models import Event, Operation, OperationTarget, Status
from tests.conftest import until
from tests.integration.operations.test_executor import executor, reached, row

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
COUNTER = "SELECT value FROM operation_sequence FOR UPDATE"

pytestmark = pytest.mark.django_db(transaction=True)


def admit(number: int = 0, targets: list[tuple[UUID, str]] | None = None) -> Operation:
    request = admission.OperationRequest(
        "probe", key=f"probe:{number}", element="x", by=Requester("test"), targets=targets or []
    )
    return admission.admit(request, now=clock.now()).operation


def claimed(count: int, parts: int = 0) -> list[Operation]:
    for number in range(count):
        admit(number, [(uuid4(), f"n{part}") for part in range(parts)])
    return attempts.claim("a", now=clock.now(), lease=3600, limit=count)


def nodes_of(operation: Operation) -> list[UUID]:
    return list(OperationTarget.objects.filter(operation=operation).values_list("node_id", flat=True))


@contextmanager
def holding(statement: str) -> Iterator[psycopg.Connection[Any]]:
    """Another process is in a transaction that has executed this."""
    with psycopg.connect(events.conninfo()) as other:
        other.execute(statement)
        yield other
        other.rollback()


@pytest.mark.parametrize("count", [1, 30])
def test_a_batch_costs_the_same_number_of_statements_at_any_size(
    count: int, django_assert_num_queries: Any
) -> None:
    """Lock timeout, operations, parts, two updates, one NOTIFY, one number range; BEGIN and COMMIT."""
    mine = claimed(count, parts=3)
    reports = {
        (one.id, one.fence): [Tick("downloading", "x", 5, 10, 50.0, "f", node) for node in nodes_of(one)]
        for one in mine
    }
    before = feed.current_seq()
    with django_assert_num_queries(9):
        assert progress.record(reports, now=NOW) == set()
    rows = Operation.objects.order_by("seq")
    assert [one.seq for one in rows] == list(range(before + 1, before + count + 1))
    assert {(one.progress, one.current_bytes, one.total_bytes, one.updated_at) for one in rows} == {
        (50.0, 15, 30, NOW)
    }
    parts = OperationTarget.objects.values_list("status", "phase", "percentage", "file_name", "current_bytes")
    assert set(parts) == {("downloading", "downloading", 50.0, "f", 5)}


@pytest.mark.rule("I3")
def test_a_batch_writes_what_is_still_owned_and_names_the_rest() -> None:
    """An old fence, an ended operation and one that is gone change nothing, and take no number."""
    kept, old, ended = claimed(3)
    attempts.finish(ended.id, ended.fence, Event.FAIL, now=NOW, error="disk full")
    before, gone = feed.current_seq(), uuid4()
    lost = {(old.id, old.fence - 1), (ended.id, ended.fence), (gone, 1)}
    reports = {attempt: [Tick("p", percentage=50)] for attempt in [*lost, (kept.id, kept.fence)]}
    assert progress.record(reports, now=NOW) == lost
    assert feed.current_seq() == before + 1
    assert dict(Operation.objects.values_list("pk", "progress")) == {kept.id: 50, old.id: 0, ended.id: 0}


def test_a_batch_does_not_wait_long_for_the_counter() -> None:
    """It holds the rows of many operations: their outcomes must not wait for progress."""
    (operation,) = claimed(1)
    reports = {(operation.id, operation.fence): [Tick(percentage=50)]}
    with holding(COUNTER), pytest.raises(OperationalError):
        progress.record(reports, now=NOW, lock_timeout=progress.BATCH_LOCK_TIMEOUT)
    progress.record(reports, now=NOW)
    assert Operation.objects.get().progress == 50


@pytest.mark.rule("I6", "O70")
def test_an_outcome_contains_the_reports_before_it() -> None:
    """What was not written yet is part of the transaction that ends the attempt."""
    failing, resting = claimed(2, parts=2)
    for operation in (failing, resting):
        node = nodes_of(operation)[0]
        record({(operation.id, operation.fence): [Tick(percentage=60, node_id=node)]}, now=NOW)
    ticks = [Tick("unpacking", "x", 7, 10, 40, "f", nodes_of(failing)[0])]
    attempts.finish(failing.id, failing.fence, Event.FAIL, now=NOW, error="disk full", ticks=ticks)
    ended = Operation.objects.get(pk=failing.pk)
    assert (ended.progress, ended.current_bytes, ended.phase, ended.error) == (30, 7, "", "disk full")
    ticks = [Tick("unpacking", "x", 7, 10, 80, "f", nodes_of(resting)[0])]
    attempts.put_back(
        resting.id, resting.fence, Event.WAIT, now=NOW, until=NOW, reason="no worker", ticks=ticks
    )
    waiting = Operation.objects.get(pk=resting.pk)
    assert (waiting.progress, waiting.message, waiting.phase) == (40, "no worker", "queued")


async def test_reports_of_attempts_share_their_transactions() -> None:
    """Bug 4: reports were a transaction each; now at most ten batches a second take numbers."""
    go_on = asyncio.Event()

    async def handler(work: Work) -> None:
        for done in range(30):
            await work.report(Tick("downloading", current_bytes=done, total_bytes=30))
        go_on.set()
        await asyncio.Event().wait()

    operation = await in_thread(admit)
    before = await in_thread(feed.current_seq)
    began = clock.monotonic()
    async with executor(handler, lease=60):
        await asyncio.wait_for(go_on.wait(), 60)
        taken = await in_thread(feed.current_seq) - before
        batches = (clock.monotonic() - began) / BATCH_INTERVAL + 1
        assert taken <= batches + 1  # and the claim

        async def written() -> bool:
            return (await row(operation)).current_bytes == 29

        await until(written)


async def test_the_last_figures_are_in_the_outcome() -> None:
    """A report right before the end is neither lost nor written after it."""

    async def handler(work: Work) -> None:
        for done in range(1, 11):
            work.progress(Tick("downloading", "x", done, 10, 5 * done, "f"))
        raise errors.Unavailable("the disk is full")

    operation = await in_thread(admit)
    async with executor(handler):
        ended = await reached(operation, Status.FAILED)
    assert (ended.current_bytes, ended.progress, ended.phase) == (10, 50, "")


@pytest.mark.rule("I3")
async def test_a_refused_report_ends_its_attempt_and_no_other() -> None:
    """The executor need not wait for the next renewal: the batch says whose operation is lost."""
    running: dict[UUID, Work] = {}
    cancelled: set[UUID] = set()

    async def handler(work: Work) -> None:
        running[work.id] = work
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.add(work.id)

    taken, kept = await in_thread(admit, 1), await in_thread(admit, 2)
    async with executor(handler, lease=3600):

        async def written() -> bool:
            return (await row(kept)).progress == 7

        await until(lambda: len(running) == 2)
        await in_thread(Operation.objects.filter(pk=taken.pk).update, lease_owner="other", fence=99)
        for work in running.values():
            work.progress(Tick(percentage=7))
        await until(lambda: bool(cancelled))
        await until(written)
        assert cancelled == {taken.pk}
        with pytest.raises(LeaseLost):
            await running[taken.pk].report(Tick("loading"))
    assert (await row(taken)).progress == 0


def test_a_row_that_is_being_written_does_not_hold_up_the_renewal_of_the_others() -> None:
    """It stays the owner's, and its turn comes again."""
    locked, free = claimed(2)
    with holding(f"SELECT id FROM operations WHERE id = '{locked.id}' FOR UPDATE"):
        held = attempts.renew("a", [locked.id, free.id], now=NOW + timedelta(days=900), lease=10)
    assert held == {locked.id: locked.fence, free.id: free.fence}
    moved = Operation.objects.filter(lease_until=NOW + timedelta(days=900, seconds=10))
    assert list(moved.values_list("pk", flat=True)) == [free.id]


async def test_leases_are_renewed_while_every_shared_thread_is_blocked() -> None:
    """Bug 5: renewals shared six threads with everything else, so that overload could lose all leases."""
    started = asyncio.Event()

    async def handler(work: Work) -> None:
        started.set()
        await asyncio.Event().wait()

    def block() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock_shared(4711)")

    threads = min(32, (os.cpu_count() or 1) + 4)
    operation = await in_thread(admit)
    running: Executor[Any] = Executor("test-owner", OperationQueue({"probe": handler}), lease=3)
    loops = asyncio.create_task(running.run())
    with psycopg.connect(events.conninfo(), autocommit=True) as look:

        def all_blocked() -> bool:
            waiting = "SELECT count(*) FROM pg_locks WHERE objid = 4711 AND NOT granted"
            return look.execute(waiting).fetchone() == (threads,)

        def lease() -> datetime:
            found = look.execute("SELECT lease_until FROM operations WHERE id = %s", [operation.id])
            lease_until: datetime = found.fetchall()[0][0]
            return lease_until

        await asyncio.wait_for(started.wait(), 30)
        with holding("SELECT pg_advisory_xact_lock(4711)") as lock:
            blocked = [asyncio.create_task(in_thread(block)) for _ in range(2 * threads)]
            await until(all_blocked)
            first = lease()

            try:
                await until(lambda: lease() > first + timedelta(seconds=3))
                assert all_blocked()
            finally:
                lock.rollback()
                await asyncio.gather(*blocked)
    await running.stop()
    loops.cancel()
    await asyncio.gather(loops, return_exceptions=True)


async def test_a_renewal_that_hangs_is_cut_and_the_thread_connects_again() -> None:
    """The thread is the only one that keeps leases: a connection that hangs must not keep it forever."""
    (operation,) = await in_thread(claimed, 1)
    keeper = LeaseKeeper("a", 2, attempts.renew)
    held: dict[UUID, int] = {}

    async def renewed() -> bool:
        try:
            held.update(await keeper.renew({operation.id: operation.fence}))
        except (OperationalError, TimeoutError):
            return False
        return True

    try:
        with holding("LOCK TABLE operations IN ACCESS EXCLUSIVE MODE"):
            assert not await renewed()
        await until(renewed)
        with psycopg.connect(events.conninfo(), autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE '%lease_owner%'"
                " AND pid <> pg_backend_pid()"
            )
        held.clear()
        await until(renewed)
    finally:
        await keeper.close()
    assert held == {operation.id: operation.fence}

    await until(lambda: not any(thread.name.startswith("leases") for thread in threading.enumerate()))


async def test_a_keeper_that_is_closed_while_a_renewal_hangs_leaves_no_connection() -> None:
    """Who closes it may be cancelled meanwhile: the thread still closes its own when it is free."""
    links: list[Any] = []
    gate = threading.Event()

    def renew(*_: Any, **__: Any) -> dict[UUID, int]:
        links.append(connection.connection)
        gate.wait(60)
        return {}

    keeper = LeaseKeeper("a", 600, renew)
    renewing = asyncio.create_task(keeper.renew({}))
    await until(lambda: bool(links))
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    gate.set()
    await asyncio.gather(renewing, return_exceptions=True)
    await until(lambda: bool(links[0].closed))
