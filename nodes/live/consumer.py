"""`/ws/feed`: everything that a page of ours shows live, over one socket a tab.

Operations come by their numbers (`operations/stream.py`), nodes and notices from the shared look
(`watch.py`). The client says by `?operations=` and `?nodes=` where it stands and gets what it missed, or
everything anew. Nothing comes from the client.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import orjson
from django.conf import settings

from localai_cluster import clock
from localai_cluster.web import ui
from nodes.live import watch
from operations.consumers import Watching, number_in, origin_of, same_origin, text_in
from operations.stream import News

ALIVE_EVERY = 5.0


class FeedConsumer(Watching):
    """One tab."""

    alive_every = ALIVE_EVERY

    async def refuse(self, code: int) -> None:
        """A page of ours can read the close code only of a socket that was opened."""
        if origin_of(self.scope) is not None and same_origin(self.scope):
            await self.accept()
        await self.close(code=code)

    async def begin(self) -> None:
        """Says who we are and whom we take the client for."""
        scope: Mapping[str, Any] = self.scope
        who = scope["principal"]
        user = {"name": who.name, "role": who.kind}
        version = str(settings.SPECTACULAR_SETTINGS["VERSION"])
        hello = {"type": "hello", "at": clock.now().isoformat(), "build": ui.build_id(), "version": version}
        await self._send(hello | {"user": user})

    def watches(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Operations, nodes and notices, and a sign of life."""
        return [*super().watches(), self._operations(), self._nodes(), self._alive()]

    async def _operations(self) -> None:
        async with contextlib.aclosing(self.operations(number_in(self.scope, "operations"))) as told:
            async for news in told:
                kind = "operations.snapshot" if news.whole else "operations.delta"
                await self._send({"type": kind, "seq": news.seq, "operations": _last_of_each(news)})

    async def _nodes(self) -> None:
        following = watch.shared().follow(text_in(self.scope, "nodes"))
        async with contextlib.aclosing(following) as messages:
            async for text in messages:
                await self.send(text_data=text)

    async def _alive(self) -> None:
        while True:
            await asyncio.sleep(self.alive_every)
            await self._send({"type": "alive", "at": clock.now().isoformat()})

    async def _send(self, message: dict[str, Any]) -> None:
        await self.send(text_data=orjson.dumps(message).decode())


def _last_of_each(news: News) -> list[dict[str, Any]]:
    """Several changes of one operation at once are its last one."""
    last = {operation["jobID"]: operation for operation in news.operations}
    return [operation for operation in news.operations if last[operation["jobID"]] is operation]
