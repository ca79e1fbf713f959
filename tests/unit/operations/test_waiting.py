"""Hints for waiting: none that arrives between look and wait is slept through."""

import asyncio
from uuid import uuid4

import pytest

from operations.executor.work import WakeUps, Watch


async def test_a_hint_between_look_and_wait_is_kept() -> None:
    """The wait returns at once, because the row may have changed after it was read."""
    hints, operation = WakeUps(), uuid4()
    with hints.watch(operation) as watch:
        hints.notify(str(operation))
        assert await watch.changed(timeout=60)
        assert not await watch.changed(timeout=0)


async def test_news_that_may_have_been_missed_wakes_everyone() -> None:
    """After a reconnect no one knows what was said meanwhile, so everyone looks."""
    hints = WakeUps()
    with hints.watch(uuid4()) as one, hints.watch(uuid4()) as other:
        hints.notify("")
        assert await one.changed(timeout=60)
        assert await other.changed(timeout=60)


async def test_hints_are_for_their_operation_only_and_leave_nothing_behind() -> None:
    """A process that waited for a million operations remembers none of them."""
    hints, mine = WakeUps(), uuid4()
    with hints.watch(mine) as watch:
        hints.notify(str(uuid4()))
        assert not await watch.changed(timeout=0)
    assert hints._watches == {}


@pytest.mark.parametrize("steps", range(4))
async def test_a_waiter_that_is_cancelled_as_a_hint_arrives_ends(steps: int) -> None:
    """A lost lease stops its attempt even then, `steps` turns of the loop after the hint."""
    watch = Watch()
    waiting = asyncio.create_task(watch.changed(timeout=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    watch.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    in_time = waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled() is in_time
