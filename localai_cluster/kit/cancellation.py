"""Reliable cancellation of a task: a library may swallow a cancellation, so it is repeated."""

import asyncio
from typing import Any

_ASK_AGAIN = 2.0


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel the task repeatedly until it has ended; ignore its outcome."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_ASK_AGAIN)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not report it as never retrieved
