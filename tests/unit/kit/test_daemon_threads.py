"""Waiting for calls that may hang."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from localai_cluster.kit import untrusted


class CountingFuture(Future[None]):
    """A future that counts its callbacks."""

    callbacks = 0

    def add_done_callback(self, fn: Callable[[Future[None]], Any]) -> None:
        self.callbacks += 1
        super().add_done_callback(fn)


async def test_a_caller_that_does_not_wait_leaves_nothing_in_the_call() -> None:
    """While a folder hung, each lookup grew the memory: a callback cannot be removed."""
    call = CountingFuture()
    call.set_running_or_notify_cancel()
    for _ in range(3):
        assert not await untrusted.wait_until_done(call, timeout=0)
    assert call.callbacks == 0
    call.set_result(None)
    assert await untrusted.wait_until_done(call, timeout=0)
