"""A lease lasts longer by the time that claims take: it counts from the beginning of its claim."""

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.kit import clock
from operations.executor import executor
from operations.executor.executor import CLAIMED_AT_ONCE, Executor


@pytest.mark.rule("O7")
async def test_leases_outlast_slow_claims_which_stay_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up on a busy machine: "10 controllers fell silent", after ten claims of 1,000 that took a lease.

    Claims were made smaller then, and each of an operation on 1,000 nodes cost a third of one of them all.
    """
    now, claims, seconds = [0.0], list[tuple[float, int]](), 12.0

    async def directly(work: Any, *args: Any, **options: Any) -> Any:
        return work(*args, **options)

    def claim(owner: str, *, lease: float, limit: int, **_: Any) -> list[Any]:
        claims.append((lease, limit))
        now[0] += seconds
        return [SimpleNamespace(id=uuid4(), fence=1)]

    async def execute(item: Any) -> None:
        """An item ends at once."""

    nothing: Any = {name: lambda *args, **options: None for name in ("on_lost", "forget", "release", "close")}
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(executor, "in_thread", directly)
    queue: Any = SimpleNamespace(
        name="slow", slots=10**6, claim=claim, execute=execute, renew=lambda *args, **options: {}, **nothing
    )
    running: Executor[Any] = Executor("owner", queue, lease=10.0)
    await running.claim_once()
    await running.claim_once()
    seconds = 0.0
    await running.claim_once()
    await running.claim_once()
    assert claims == [(lease, CLAIMED_AT_ONCE) for lease in (10, 22, 22, 16)]
    await running.stop()
