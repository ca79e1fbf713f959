"""One ear of a web process for what the channel layer carries, whoever listens.

The layer keeps an endless queue for everybody who subscribes and reads it at that one's pace; here one
subscription serves the whole process and is emptied at once. The layer may be away or lose messages: then
followers find the changes in the rows a little later.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from channels.layers import get_channel_layer

from localai_cluster import cancel
from operations.events import GROUP
from operations.stream import Follower

log = logging.getLogger(__name__)

_AGAIN = 1.0


class Ear:
    """Subscribes while there is a follower."""

    def __init__(self) -> None:
        self._followers: set[Follower] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def lent(self, follower: Follower) -> AsyncIterator[None]:
        """The follower hears every change that gets through."""
        self._followers.add(follower)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="operations heard")
        try:
            yield
        finally:
            self._followers.discard(follower)
            if not self._followers and self._task is not None:
                task, self._task = self._task, None
                await cancel.end(task)

    async def _run(self) -> None:
        failing = False
        while True:
            try:
                async with _subscription() as (layer, channel):
                    failing = False
                    for follower in self._followers:
                        follower.wake()  # what came before was not heard
                    while True:
                        self._pass_on(await layer.receive(channel))
            except Exception as error:
                # Whatever the layer's client raises: without it, rows are looked at from time to time.
                if not failing:
                    log.warning("operations are not heard: %r; trying again", error)
                failing = True
                await asyncio.sleep(_AGAIN)

    def _pass_on(self, message: dict[str, Any]) -> None:
        for follower in self._followers:
            follower.hear(int(message["seq"]), message["operation"])


@contextlib.asynccontextmanager
async def _subscription() -> AsyncIterator[tuple[Any, str]]:
    layer: Any = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add(GROUP, channel)
    try:
        yield layer, channel
    finally:
        with contextlib.suppress(Exception):
            await layer.group_discard(GROUP, channel)


_shared = Ear()


def shared() -> Ear:
    """The one ear of this process."""
    return _shared
