"""What `/ws/feed` carries beside operations: a greeting, nodes and notices, and a sign of life.

Nodes and notices come from the look that all tabs of a process share (`watch.py`). The client says by
`?nodes=` where it stands and gets what it missed, or everything.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from django.conf import settings

from localai_cluster.kit import clock
from localai_cluster.web import page
from localai_cluster.web.sockets import Scope, encode_message, query_text
from nodes.live import shapes, watch

ALIVE_EVERY = 5.0
"""Seconds between two signs of life."""


def greeting(scope: Scope) -> str:
    """Says who the server is and whom it takes the client for."""
    principal = scope["principal"]
    return encode_message(
        shapes.HELLO.of(
            at=clock.now().isoformat(),
            build=page.build_id(),
            version=str(settings.SPECTACULAR_SETTINGS["VERSION"]),
            user=shapes.FEED_USER.of(name=principal.name, role=principal.kind),
        )
    )


async def nodes(scope: Scope) -> AsyncGenerator[str, None]:
    """Nodes and notices."""
    async with contextlib.aclosing(watch.shared().follow(query_text(scope, "nodes"))) as messages:
        async for message in messages:
            yield message


async def alive(scope: Scope) -> AsyncGenerator[str, None]:
    """Lets a page tell a quiet cluster from a dead socket."""
    while True:
        await asyncio.sleep(ALIVE_EVERY)
        yield encode_message(shapes.ALIVE.of(at=clock.now().isoformat()))
