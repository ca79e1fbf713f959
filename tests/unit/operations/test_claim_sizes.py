"""The sizes of the executor's claims, and when it renews leases."""

import asyncio
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.kit import clock
from operations.executor import executor
from operations.executor.executor import MAX_CLAIM_ITEMS, MIN_CLAIM_ITEMS, Executor


class Backlog:
    """A queue with more due items than slots; a claim takes `seconds` an item."""

    name, slots = "backlog", 10**6

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.due, self.limits, self._now = 0.0, 10**6, list[int](), 0.0
        monkeypatch.setattr(clock, "monotonic", lambda: self._now)

    def on_lost(self, lost: Any) -> None:
        """Nothing is lost here."""

    def forget(self, attempt: Any) -> None:
        """Nothing is kept here."""

    def renew(self, *args: Any, **options: Any) -> dict[Any, int]:
        return {}

    def release(self, owner: str, *, now: datetime) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open here."""

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> list[Any]:
        self.limits.append(limit)
        self._now += self.seconds * min(limit, self.due)
        return [SimpleNamespace(id=uuid4(), fence=1) for _ in range(min(limit, self.due))]

    async def execute(self, claimed: Any) -> None:
        """An item ends at once."""


async def directly(work: Any, *args: Any, **options: Any) -> Any:
    """Call without a thread."""
    return work(*args, **options)


@pytest.mark.rule("O7")
async def test_a_slow_claim_is_followed_by_smaller_ones_and_a_fast_one_by_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease counts from the beginning of its claim.

    Given up on a busy machine: "10 controllers fell silent", after ten claims of 1,000.
    """

    monkeypatch.setattr(executor, "in_thread", directly)
    queue: Any = Backlog(monkeypatch)
    running: Executor[Any] = Executor("owner", queue, lease=10.0)
    queue.seconds = 0.02
    for _ in range(6):
        await running.claim_once()
    assert queue.limits == [MAX_CLAIM_ITEMS, 512, 256, 128, 128, 128]
    queue.seconds = 1.0
    for _ in range(3):
        await running.claim_once()
    assert queue.limits[-1] == MIN_CLAIM_ITEMS, "a claim always goes on"
    queue.due = 1
    await running.claim_once()
    await running.claim_once()
    assert queue.limits[-1] == MIN_CLAIM_ITEMS, "a claim of a few rows does not show that a large one is fast"
    queue.seconds, queue.due = 0.0, 10**6
    for _ in range(8):
        await running.claim_once()
    assert queue.limits[-1] == MAX_CLAIM_ITEMS
    await running.stop()


@pytest.mark.rule("O7")
async def test_an_executor_without_running_items_renews_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle controller would write twice a second for nothing."""
    monkeypatch.setattr(executor, "in_thread", directly)
    queue: Any = Backlog(monkeypatch)
    queue.due, queue.execute = 1, lambda claimed: asyncio.Event().wait()
    running: Executor[Any] = Executor("owner", queue, lease=10.0)
    renewed: list[dict[Any, int]] = []

    async def renew(fences: dict[Any, int]) -> dict[Any, int]:
        renewed.append(fences)
        return fences

    monkeypatch.setattr(running._keeper, "renew", renew)
    await running._renew_leases()
    assert renewed == []
    await running.claim_once()
    await running._renew_leases()
    assert [list(fences.values()) for fences in renewed] == [[1]]
    assert running.running() == 1
    await running.stop()
