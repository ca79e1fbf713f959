"""The executor against a real PostgreSQL: the four ends of an attempt, lost leases, clean stop."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from localai_cluster.kit import clock, errors
from operations.executor.executor import Executor, OperationQueue
from operations.executor.work import Abandoned, Postpone, Work, in_thread, retry_delay
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.models import Operation, Status
from operations.reconcilers.tasks import SCHEDULES
from tests.conftest import until

pytestmark = pytest.mark.django_db(transaction=True)


@asynccontextmanager
async def executor(
    handler: Callable[[Work], Awaitable[Any]], *, lease: float = 5.0
) -> AsyncIterator[Executor[Any]]:
    """A running executor whose only handler is `handler`."""
    running: Executor[Any] = Executor("test-owner", OperationQueue({"probe": handler}), lease=lease)
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        await running.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def admit(**more: Any) -> Operation:
    request = admission.OperationRequest("probe", key="probe:x", element="x", by=Requester("test"), **more)
    return (await in_thread(admission.admit, request, now=clock.now())).operation


async def row(operation: Operation) -> Operation:
    return await in_thread(Operation.objects.get, pk=operation.pk)


async def reached(operation: Operation, *states: Status) -> Operation:
    """Waits until the operation is in one of `states`."""
    seen: list[str] = []

    async def there() -> bool:
        seen.append((await row(operation)).status)
        return seen[-1] in states

    await until(there, what=seen)
    return await row(operation)


@pytest.mark.rule("O7", "R2.21")
async def test_a_result_completes_the_operation() -> None:
    """The handler's result is kept; progress is 100 only now."""

    async def handler(work: Work) -> Mapping[str, Any]:
        await work.report(Tick(phase="downloading", current_bytes=5, total_bytes=10, percentage=50))
        return {"answer": 42}

    operation = await admit()
    async with executor(handler):
        ended = await reached(operation, Status.COMPLETED)
    assert (ended.result, ended.progress, ended.lease_owner, ended.current_bytes) == (
        {"answer": 42},
        100,
        "",
        5,
    )


@pytest.mark.parametrize(
    ("raised", "status", "text"),
    [
        (errors.Conflict("the disk is full"), Status.FAILED, "the disk is full"),
        (Abandoned("no request waits"), Status.CANCELLED, ""),
        (RuntimeError("secret detail"), Status.FAILED, "internal error"),
    ],
)
@pytest.mark.rule("O7", "O8")
async def test_errors_end_the_operation_with_a_reason(raised: Exception, status: Status, text: str) -> None:
    """A stated error is shown, an unexpected one is logged and only named by its request id."""

    async def handler(work: Work) -> None:
        raise raised

    operation = await admit()
    async with executor(handler):
        ended = await reached(operation, Status.FAILED, Status.CANCELLED)
    assert ended.status == status
    assert text in ended.error
    assert "secret detail" not in ended.error
    is_stated = isinstance(raised, errors.ClusterError)
    assert ended.result == ({"code": "conflict"} if is_stated else {}), "a parent decides by the code"


async def test_a_postponed_operation_says_why_and_is_tried_again() -> None:
    """Rule 4: reason and next look are in the row; the attempt is counted."""
    fences = []

    async def handler(work: Work) -> None:
        fences.append(work.operation.fence)
        if len(fences) == 1:
            raise Postpone("the worker is away", seconds=0.05, payload={"avoid": 1})

    operation = await admit()
    async with executor(handler):
        ended = await reached(operation, Status.COMPLETED)
    assert fences == [1, 2]
    assert (ended.attempts, ended.payload) == (1, {"avoid": 1})


async def test_a_waiting_operation_keeps_no_lease() -> None:
    """I2: waiting has a reason and a next look instead of an owner."""

    async def handler(work: Work) -> None:
        raise Postpone("no node is registered", seconds=60, waiting=True)

    operation = await admit()
    async with executor(handler):
        waiting = await reached(operation, Status.WAITING)
    assert waiting.message == "no node is registered"
    assert waiting.lease_until is None
    assert waiting.next_attempt_at > clock.now() + timedelta(seconds=30)


async def test_a_lost_lease_stops_the_attempt() -> None:
    """I3: when somebody else owns the operation, the running attempt is cancelled and writes nothing."""
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(work: Work) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    operation = await admit()
    async with executor(handler, lease=0.4):
        await asyncio.wait_for(started.wait(), 60)
        await in_thread(
            Operation.objects.filter(pk=operation.pk).update,
            lease_owner="other",
            fence=99,
            lease_until=clock.now() + timedelta(seconds=60),
        )
        await asyncio.wait_for(cancelled.wait(), 60)
    now = await row(operation)
    assert (now.status, now.lease_owner) == (Status.PROCESSING, "other")


async def test_an_operation_claimed_again_here_ends_its_former_attempt() -> None:
    """I3: after a pause the same executor may win the operation back; one attempt runs, and is renewed."""
    fences: list[int] = []
    ended = asyncio.Event()

    async def handler(work: Work) -> None:
        fences.append(work.operation.fence)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    operation = await admit()
    async with executor(handler, lease=3) as running:
        await until(lambda: fences == [1])
        await in_thread(attempts.reap, now=clock.now() + timedelta(seconds=60))
        await in_thread(Operation.objects.filter(pk=operation.pk).update, next_attempt_at=clock.now())
        running.wake()
        await until(lambda: fences == [1, 2])
        await asyncio.wait_for(ended.wait(), 12)
        first = (await row(operation)).lease_until

        async def renewed() -> bool:
            until = (await row(operation)).lease_until
            return until is not None and first is not None and until > first

        await until(renewed)


async def test_a_renewal_under_way_does_not_end_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that was asked for one attempt says nothing of the next one, which begins meanwhile."""
    fences: list[int] = []
    asked, second_begun, asked_again = threading.Event(), threading.Event(), threading.Event()
    renew = OperationQueue.renew

    def slow_renew(*arguments: Any, **options: Any) -> Any:
        if second_begun.is_set():
            asked_again.set()
        asked.set()
        second_begun.wait(60)
        return renew(*arguments, **options)

    async def handler(work: Work) -> None:
        fences.append(work.operation.fence)
        if len(fences) == 1:
            await asyncio.to_thread(asked.wait, 60)
            raise Postpone("another node is tried", seconds=0, waiting=True)
        second_begun.set()
        await asyncio.to_thread(asked_again.wait, 60)

    monkeypatch.setattr(OperationQueue, "renew", staticmethod(slow_renew))
    operation = await admit()
    async with executor(handler, lease=8):
        await reached(operation, Status.COMPLETED)
    assert fences == [1, 2]


async def test_a_stopped_executor_hands_back_at_once() -> None:
    """A clean stop of a controller costs no lease time."""
    started = asyncio.Event()

    async def handler(work: Work) -> None:
        started.set()
        await asyncio.Event().wait()

    operation = await admit()
    async with executor(handler, lease=600):
        await asyncio.wait_for(started.wait(), 60)
    handed_back = await row(operation)
    assert (handed_back.status, handed_back.lease_until) == (Status.PENDING, None)


async def test_a_library_that_swallows_a_cancellation_does_not_keep_a_controller_from_stopping() -> None:
    """As `asyncio.wait_for` of Python 3.11 does; the leases would run out only when the process is killed."""
    started = asyncio.Event()

    async def handler(work: Work) -> None:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    operation = await admit()
    async with asyncio.timeout(120), executor(handler, lease=600):
        await asyncio.wait_for(started.wait(), 60)
    handed_back = await row(operation)
    assert (handed_back.status, handed_back.lease_until) == (Status.PENDING, None)


async def test_a_claim_under_way_is_handed_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that commits while the controller stops must not leave a lease that no one keeps."""
    asked, go_on, claimed = threading.Event(), threading.Event(), threading.Event()
    claim = OperationQueue.claim

    def slow_claim(*arguments: Any, **options: Any) -> list[Operation]:
        asked.set()
        go_on.wait(60)
        try:
            return claim(*arguments, **options)
        finally:
            claimed.set()

    async def handler(work: Work) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(OperationQueue, "claim", staticmethod(slow_claim))
    operation = await admit()
    async with executor(handler) as running:
        assert await asyncio.to_thread(asked.wait, 10)
        stopping = asyncio.create_task(running.stop())
        await asyncio.wait({stopping}, timeout=0.5)
        go_on.set()
        assert await asyncio.to_thread(claimed.wait, 10)
        await stopping
        handed_back = await row(operation)
    assert (handed_back.status, handed_back.lease_until) == (Status.PENDING, None)


async def test_a_database_that_hangs_ends_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: after a lease without renewal another controller may have taken over; a hanging look is none."""
    started, cancelled, go_on = asyncio.Event(), asyncio.Event(), threading.Event()

    async def handler(work: Work) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def hang(*arguments: Any, **options: Any) -> None:
        go_on.wait(180)

    monkeypatch.setattr(OperationQueue, "renew", staticmethod(hang))
    await admit()
    async with executor(handler, lease=0.8):
        try:
            await asyncio.wait_for(started.wait(), 60)
            await asyncio.wait_for(cancelled.wait(), 60)
        finally:
            go_on.set()


async def test_an_attempt_cut_by_an_outage_is_made_again_by_the_executor_alone() -> None:
    """I2: what could not be recorded is taken back when its lease has run out, whether or not tasks run."""
    fences: list[int] = []

    async def handler(work: Work) -> None:
        fences.append(work.operation.fence)
        if len(fences) == 1:
            raise OperationalError("server closed the connection unexpectedly")

    operation = await admit()
    async with executor(handler, lease=0.4):
        await reached(operation, Status.COMPLETED)
    assert fences == [1, 2]


@pytest.mark.rule("A70", "O88", "H5", "R2.19", "T-JOB-5")
async def test_what_a_dead_controller_left_is_taken_up_at_the_start() -> None:
    """Not at the next turn only, and without the schedule, which does the same every few seconds."""
    fences: list[int] = []

    async def handler(work: Work) -> None:
        fences.append(work.operation.fence)

    operation = await admit()
    assert len(await in_thread(attempts.claim, "dead", now=clock.now(), lease=-60.0, limit=1)) == 1
    async with executor(handler, lease=600.0):
        await reached(operation, Status.COMPLETED)
    assert fences == [2]
    reaping = {one.function: one.cron for one in SCHEDULES}[
        "operations.reconcilers.tasks.reap_expired_leases"
    ]
    assert reaping == "* * * * * */5"


@pytest.mark.rule("T-JOB-18")
async def test_an_attempt_that_does_not_end_keeps_no_other_lease_from_being_renewed() -> None:
    """One handler stuck in its own clearing up must not cost the others their leases."""
    stuck, go_on = asyncio.Event(), asyncio.Event()
    fences: dict[str, list[int]] = {"probe:stuck": [], "probe:well": []}

    async def handler(work: Work) -> None:
        fences[work.operation.key].append(work.operation.fence)
        try:
            await asyncio.Event().wait()
        finally:
            if work.operation.key == "probe:stuck":
                stuck.set()
                await go_on.wait()

    async def admit_as(key: str) -> Operation:
        request = admission.OperationRequest("probe", key=key, element="x", by=Requester("test"))
        return (await in_thread(admission.admit, request, now=clock.now())).operation

    bad, well = await admit_as("probe:stuck"), await admit_as("probe:well")

    async with executor(handler, lease=2.0):
        try:
            await until(lambda: all(fences.values()))
            await in_thread(Operation.objects.filter(pk=bad.pk).update, lease_owner="other", fence=99)
            await asyncio.wait_for(stuck.wait(), 60)
            first = (await row(well)).lease_until

            async def renewed() -> bool:
                until = (await row(well)).lease_until
                return until is not None and first is not None and until > first + timedelta(seconds=2)

            await until(renewed)
        finally:
            go_on.set()
    assert fences["probe:well"] == [1]


async def test_an_unknown_kind_fails_clearly() -> None:
    """An operation of a newer release does not hang in an older controller."""

    async def handler(work: Work) -> None: ...

    request = admission.OperationRequest("from_the_future", key="k", element="x", by=Requester("test"))
    admitted = await in_thread(admission.admit, request, now=clock.now())
    async with executor(handler):
        ended = await reached(admitted.operation, Status.FAILED)
    assert "no handler" in ended.error


def test_retry_delays_double_to_a_cap() -> None:
    """1, 2, 4 … 30 s."""
    assert [retry_delay(attempts) for attempts in (0, 1, 2, 3, 4, 5, 50)] == [1, 2, 4, 8, 16, 30, 30]


async def test_a_text_that_the_database_cannot_hold_does_not_lose_the_outcome() -> None:
    """I2: an engine's last words may hold null bytes; the operation ends with them made harmless."""

    async def handler(work: Work) -> None:
        await work.report(Tick(phase="p" * 100, message="a\0b", file_name="c\0d", node_name="n" * 300))
        raise errors.Unavailable("Last stderr:\n\0\0core dumped")

    operation = await admit()
    async with executor(handler):
        ended = await reached(operation, Status.FAILED)
    assert ended.error == "Last stderr:\n\ufffd\ufffdcore dumped"
    assert ended.phase == ""
