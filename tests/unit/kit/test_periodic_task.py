"""Loops of a process: wake-ups, intervals, retries and the end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from localai_cluster.kit import backoff, clock
from localai_cluster.kit.periodic_task import PeriodicTask, WorkPool
from tests.conftest import until


def stepping(seen: list[float], pause: float | None = None) -> Callable[[], Awaitable[float | None]]:
    async def step() -> float | None:
        seen.append(clock.monotonic())
        return pause

    return step


async def test_a_step_follows_each_wake_up_and_the_interval() -> None:
    """A wake-up during a step causes another one; `stop` ends the task after the running step."""
    seen: list[float] = []
    task = PeriodicTask("test", stepping(seen), interval=60.0)
    running = asyncio.create_task(task.run())
    await until(lambda: len(seen) == 1)
    task.wake()
    await until(lambda: len(seen) == 2)
    task.stop()
    await asyncio.wait_for(running, 30)
    assert len(seen) == 2
    quick: list[float] = []
    again = asyncio.create_task(PeriodicTask("test", stepping(quick), interval=0.01).run())
    await until(lambda: len(quick) > 3)
    again.cancel()


async def test_without_an_interval_only_a_wake_up_causes_a_step() -> None:
    seen: list[float] = []
    task = PeriodicTask("test", stepping(seen), interval=None)
    running = asyncio.create_task(task.run())
    await asyncio.sleep(0.01)
    assert not seen
    task.wake()
    await until(lambda: len(seen) == 1)
    running.cancel()


async def test_an_error_is_retried_and_any_other_ends_the_task() -> None:
    errors: list[Exception] = [ValueError("away"), ValueError("away"), KeyError("a defect")]
    raised: list[float] = []

    async def step() -> None:
        raised.append(clock.monotonic())
        raise errors[len(raised) - 1]

    task = PeriodicTask("test", step, interval=0.02, retry_on=(ValueError,))
    with pytest.raises(KeyError):
        await asyncio.wait_for(task.run(), 30)
    assert len(raised) == 3


class Pool(WorkPool[int]):
    """Two items at a time."""

    def __init__(self, items: Sequence[int]) -> None:
        super().__init__("test", parallel=2, interval=60.0, gather=0.0, retry_on=())
        self.due, self.now, self.most, self.done = list(items), 0, 0, list[int]()

    async def claim_due(self, limit: int) -> Sequence[int]:
        claimed, self.due = self.due[:limit], self.due[limit:]
        return claimed

    async def next_due(self) -> float:
        return 60.0

    async def run_item(self, item: int) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        self.done.append(item)


async def test_a_pool_runs_what_is_due_a_few_at_a_time() -> None:
    pool = Pool(range(7))
    running = asyncio.create_task(pool.run())
    await until(lambda: len(pool.done) == 7)
    assert (pool.most, sorted(pool.done)) == (2, list(range(7)))
    running.cancel()


def test_delays_double_up_to_the_longest() -> None:
    delays = [backoff.delay(failures, first=5.0, longest=900.0) for failures in (0, 1, 2, 3, 8, 9, 500)]
    assert delays == [5, 5, 10, 20, 640, 900, 900]
