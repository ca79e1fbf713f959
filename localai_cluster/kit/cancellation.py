"""Limited waits, and reliable cancellation: a library may swallow a cancellation, so it is repeated."""

import asyncio
import contextlib
from typing import Any

_CANCEL_REPEAT_SECONDS = 2.0
"""Seconds after which a task that is still running is cancelled again."""


async def wait_for(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait at most `seconds` (None = no limit) for the event; return True if it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def cancel_and_wait(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks, repeatedly until all have ended; ignore their results and errors."""
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_REPEAT_SECONDS)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it as never retrieved
