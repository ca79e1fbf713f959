"""A block that another task ends with an error."""

import asyncio

import pytest

from localai_cluster.web.wire import CancelScope, Disconnected


@pytest.mark.rule("R2.73")
async def test_a_scope_that_has_ended_cancels_nothing() -> None:
    """The watch for a disconnect may end in the turn of the loop in which the work ends."""
    with CancelScope() as scope:
        pass
    scope.cancel(Disconnected())
    await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@pytest.mark.rule("R2.73")
async def test_an_open_scope_raises_the_error_that_ends_it() -> None:
    async def work(scope: CancelScope) -> None:
        with scope:
            begun.set()
            await asyncio.Event().wait()

    begun, scope = asyncio.Event(), CancelScope()
    task = asyncio.create_task(work(scope))
    await begun.wait()
    scope.cancel(Disconnected())
    with pytest.raises(Disconnected):
        await task
