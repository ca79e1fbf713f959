"""Ending a task for certain: a library on its way may swallow a cancellation, and then no one asks again."""

import asyncio
from typing import Any

_ASK_AGAIN = 2.0


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel the task, as often as it takes, and return when it has ended, however it did."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_ASK_AGAIN)
    if not task.cancelled():
        task.exception()  # looked at, so that it is not reported as forgotten
