"""A task ends, even if a library swallows the cancellation."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from localai_cluster.kit import cancellation
from localai_cluster.worker.cancellation import in_thread
from localai_cluster.worker.files.disk import Threads
from tests.support.cluster import ROOT


async def test_a_swallowed_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked until it has ended."""
    monkeypatch.setattr(cancellation, "_CANCEL_REPEAT_SECONDS", 0.01)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await cancellation.cancel_and_wait(task)
    assert (task.cancelled(), swallowed) == (True, 3)


async def test_how_it_ended_is_no_error() -> None:
    """A task that failed on its way out, and one that had ended before."""

    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("on the way out")

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    other = asyncio.create_task(asyncio.sleep(600))
    for _ in range(2):
        await cancellation.cancel_and_wait(task, other)
    assert other.cancelled()
    assert isinstance(task.exception(), ValueError)


@pytest.mark.parametrize("run", [in_thread, Threads().run])
async def test_a_thread_is_waited_for_however_often_its_task_is_cancelled(
    run: Callable[..., Coroutine[Any, Any, object]],
) -> None:
    """Else the worker would close a file, or let the next fetch have it, while a thread writes to it."""
    begun, may_end = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        may_end.wait(60)

    task = asyncio.create_task(run(write))
    try:
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(3):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert not task.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_nothing_of_the_product_waits_with_wait_for() -> None:
    """Python 3.11's `wait_for` loses a cancellation that comes with the result: a loop would never end."""
    rooms = ("localai_cluster", "nodes", "operations")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 100
    found = [path.name for path in sources if "asyncio.wait_for(" in path.read_text(encoding="utf-8")]
    assert found == []
