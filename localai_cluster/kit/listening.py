"""A small HTTP server for a process with another main task: uvicorn's connections without its server.

The process handles its own signals and shutdown. Workers serve probes and logs with it, controllers and the
task cluster their metrics.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import uvicorn
from uvicorn.server import ServerState

from localai_cluster.kit.addresses import Address
from localai_cluster.kit.connections import BoundedHead, WatchingSocket

log = logging.getLogger(__name__)

CONNECTIONS = 256
PING_EVERY, PONG_WITHIN = 30.0, 90.0
FAREWELL = 1.0
"""Seconds for responses to finish at the shutdown."""
LARGEST_MESSAGE = 4096
"""Largest message of a websocket's client in bytes; its content is ignored."""
AGAIN = 30.0
"""Seconds before a retry to listen on an address that is in use."""


@contextlib.asynccontextmanager
async def serving(listener: socket.socket, application: Any) -> AsyncIterator[None]:
    """Serve an ASGI application on `listener` until the end of the block, then end all connections."""
    config = uvicorn.Config(
        application,
        http=BoundedHead,
        ws=WatchingSocket,
        ws_max_size=LARGEST_MESSAGE,
        ws_ping_interval=PING_EVERY,
        ws_ping_timeout=PONG_WITHIN,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedHead(config=config, server_state=state, app_state={}), sock=listener
    )
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=FAREWELL)
        for task in list(state.tasks):
            task.cancel()
        for connection in list(state.connections):
            connection.transport.abort()


async def serve(address: Address, application: Any, again: float = AGAIN) -> NoReturn:
    """Serve on an address until cancelled. While it cannot be used the process runs without, and retries."""
    while True:
        try:
            # A host name is resolved, which may block.
            listener = await asyncio.to_thread(_bound, address)
        except OSError as error:
            log.warning("cannot listen on %s, again in %.0f s: %s", address, again, error)
            await asyncio.sleep(again)
            continue
        async with serving(listener, application):
            log.info("listening on http://%s", address)
            await asyncio.Event().wait()


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family)
